"""Adapters from the outside: an engine, and a server over HTTP, against transformers with merged weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

from runtime.api import Engine
from runtime.config.checkpoints import find_checkpoint
from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import launch
from runtime.protocol.errors import AdapterError, BadRequest, ModelNotFound
from runtime.server.app import build_app
from tests.process.runtime.server.conftest import listening
from tests.unit.runtime.engine.conftest import Tiny
from tests.unit.runtime.lora.making import Made, make_adapter

SMALL: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "max_total_tokens": 8192}
GREEDY = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
PROMPT = "The city of Hesper lies on the river, and the ruler of"


@pytest.fixture(scope="module")
def base() -> Any:
    path = find_checkpoint("pocket")
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture(scope="module")
def adapters(base: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Made]:
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "one": make_adapter(folder / "one", base, std=0.3, seed=1),
        "two": make_adapter(folder / "two", base, std=0.3, seed=2, rank=8, modules=("q_proj", "v_proj")),
        "three": make_adapter(folder / "three", base, std=0.3, seed=3),
    }


@pytest.fixture(scope="module")
def engine(adapters: dict[str, Made]) -> Iterator[Engine]:
    with Engine("pocket", lora_paths=[f"one={adapters['one'].path}"], **SMALL) as made:
        yield made


@pytest.fixture
def right(engine: Engine, base: Any, adapters: dict[str, Made]) -> Any:
    models = {None: base, **{name: one.model for name, one in adapters.items()}}

    def greedy(name: str | None, text: str = PROMPT, count: int = 12) -> list[int]:
        return Tiny(Path(), models[name]).greedy(engine.encode(text), count)

    return greedy


def check_many(engine: Engine, adapters: dict[str, Made], right: Any) -> None:
    names = [None, "one", "two", "three", "two", None, "one"]
    prompts = [PROMPT] * 4 + ["Another beginning:"] * 3
    for name in ("two", "three"):
        engine.load_lora_adapter(name, str(adapters[name].path))
    outputs = engine.generate(prompts, GREEDY, lora_path=names)
    assert [list(one.output_ids) for one in outputs] == [right(n, p) for n, p in zip(names, prompts)]
    assert len({tuple(one.output_ids) for one in outputs}) >= 5
    assert engine.unload_lora_adapter("two") == {n: str(adapters[n].path) for n in ("one", "three")}
    engine.unload_lora_adapter("three")


def test_a_batch_with_many_adapters(engine: Engine, adapters: dict[str, Made], right: Any) -> None:
    check_many(engine, adapters, right)
    again = engine.generate([PROMPT] * 2, GREEDY, lora_path=["one", None])
    assert [one.meta["cached_tokens"] > 5 for one in again] == [True, True]
    assert [list(one.output_ids) for one in again] == [right("one"), right(None)]


def test_samples_choices_and_vectors(engine: Engine, adapters: dict[str, Made], base: Any) -> None:
    sampled = {"temperature": 0.9, "seed": 5, "n": 2, "max_new_tokens": 8}
    alone = [
        engine.generate(PROMPT, {**sampled, "n": 1}, lora_path="one").output_ids,
        engine.generate(PROMPT, sampled, lora_path="one")[0].output_ids,
    ]
    assert alone[0] == alone[1]
    ids = engine.encode(PROMPT)
    with torch.inference_mode():
        states = [
            model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1]
            for model in (base, adapters["one"].model)
        ]
    for name, state in zip((None, "one"), states):
        [found] = engine.embed(PROMPT, lora_path=name)
        assert found.embedding == pytest.approx((state / state.norm()).tolist(), abs=1e-4)
        scores = engine.generate(PROMPT, choices=[" a", " the river"], lora_path=name).choices
        assert scores is not None
    assert engine.generate(PROMPT, {"regex": "[a-z]{4}"}, lora_path="one").text.isalpha()


def test_what_is_wrong_is_said(engine: Engine, adapters: dict[str, Made], tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"'none'.*there are: one"):
        engine.generate("a", lora_path="none")
    with pytest.raises(BadRequest, match="is empty"):
        engine.generate("a", lora_path="")
    with pytest.raises(ModelNotFound):
        engine.unload_lora_adapter("none")
    with pytest.raises(AdapterError, match="loaded already"):
        engine.load_lora_adapter("one", str(adapters["two"].path))
    with pytest.raises(AdapterError, match=r"holds no adapter_config\.json"):
        engine.load_lora_adapter("new", str(tmp_path))
    [found] = engine.generate(["a"], GREEDY, lora_path=["x"], on_error="return")
    assert isinstance(found, ModelNotFound)
    assert list(engine.state()["lora_adapters"]) == ["one"]


def test_options_that_are_refused(adapters: dict[str, Made], tmp_path: Path) -> None:
    one = f"one={adapters['one'].path}"
    for options, where in (
        ({"lora_paths": [one, one]}, "lora_paths"),
        ({"lora_paths": ["one="]}, "lora_paths"),
        ({"lora_paths": [one], "enable_lora": False}, "lora_paths"),
        ({"enable_lora": True, "max_loras_per_batch": 0}, "max_loras_per_batch"),
        ({"enable_lora": True, "max_loaded_loras": 0}, "max_loaded_loras"),
        ({"lora_paths": [one], "max_lora_rank": 0}, "max_lora_rank"),
    ):
        with pytest.raises(BadRequest) as found:
            EngineConfig.of({"model": "pocket", **options})
        assert where in str(found.value.where)
    with pytest.raises(AdapterError, match="max_lora_rank is 3"):
        Engine("pocket", lora_paths=[one], max_lora_rank=3, runner_process=False, **SMALL)


@pytest.fixture(scope="module")
def client(adapters: dict[str, Made]) -> Iterator[httpx.Client]:
    made = launch(EngineConfig.of({"model": "pocket", "enable_lora": True, "runner_process": False, **SMALL}))
    config = ServerConfig(served_model_name="pocket")
    with (
        listening(build_app(made.manager, config), config) as server,
        httpx.Client(base_url=server.url, timeout=300) as asked,
    ):
        loaded = {"lora_name": "one", "lora_path": str(adapters["one"].path)}
        answer = asked.post("/load_lora_adapter", json=loaded)
        assert answer.json() == {"loaded_adapters": {"one": loaded["lora_path"]}, "success": True}
        yield asked
    made.close()


def test_adapters_over_http(client: httpx.Client, adapters: dict[str, Made], right: Any) -> None:
    body = {"text": PROMPT, "sampling_params": GREEDY}
    for name in (None, "one"):
        answer = client.post("/generate", json={**body, "lora_path": name}).json()
        assert answer["output_ids"] == right(name)
    two = {"lora_name": "two", "lora_path": str(adapters["two"].path), "pinned": True}
    assert client.post("/load_lora_adapter", json=two).status_code == 200
    answer = client.post("/generate", json={**body, "text": [PROMPT] * 2, "lora_path": ["two", "one"]}).json()
    assert [one["output_ids"] for one in answer] == [right("two"), right("one")]
    cards = client.get("/v1/models").json()["data"]
    assert [(one["id"], one["parent"]) for one in cards] == [
        ("pocket", None), ("pocket:one", "pocket"), ("pocket:two", "pocket"),
    ]  # fmt: skip
    assert client.get("/v1/models/pocket:one").json()["root"] == str(adapters["one"].path)
    assert client.get("/v1/models/pocket:none").status_code == 404
    assert client.post("/unload_lora_adapter", json={"lora_name": "two"}).json()["success"]
    for path, wrong, status in (
        ("/unload_lora_adapter", {"lora_name": "two"}, 404),
        ("/load_lora_adapter", {"lora_name": "one", "lora_path": "/x"}, 400),
        ("/load_lora_adapter", {"lora_name": "new", "lora_path": "/nowhere"}, 400),
        ("/load_lora_adapter", {"lora_name": "new"}, 400),
        ("/generate", {**body, "lora_path": "two"}, 404),
        ("/generate", {**body, "lora_path": 7}, 400),
    ):
        answer = client.post(path, json=wrong)
        assert (answer.status_code, set(answer.json())) == (
            status, {"error", "object", "message", "type", "param", "code"},
        ), answer.text  # fmt: skip


def test_the_model_names_the_adapter(client: httpx.Client) -> None:
    def said(model: str, **fields: Any) -> str:
        body = {"model": model, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
        return client.post("/v1/completions", json=body).json()["choices"][0]["text"]

    plain, adapted = said("pocket"), said("pocket:one")
    assert plain != adapted
    assert (
        said("pocket", lora_path="one")
        == said("default:one")
        == said("pocket:one", lora_path="one")
        == adapted
    )
    assert said("pocket", lora_path="") == plain
    turns = [{"role": "user", "content": "Who rules Hesper?"}]
    texts: dict[str, list[str]] = {}
    for model in ("pocket", "pocket:one"):
        chat = {"model": model, "messages": turns, "max_tokens": 8, "temperature": 0}
        reply = client.post("/v1/responses", json={
            "model": model, "input": "Who rules Hesper?", "max_output_tokens": 16, "temperature": 0,
        })  # fmt: skip
        texts[model] = [
            client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"],
            client.post("/v1/messages", json=chat).json()["content"][0]["text"],
            reply.json()["output"][0]["content"][0]["text"],
            client.post("/v1/embeddings", json={"model": model, "input": "a"}).json()["data"][0]["embedding"],
        ]
    assert all(one != other for one, other in zip(*texts.values(), strict=True))
    for model, fields, status in (
        ("pocket:two", {}, 404),
        ("pocket:", {}, 404),
        ("other:one", {}, 404),
        ("pocket:one", {"lora_path": "two"}, 400),
    ):
        body = {"model": model, "prompt": "a", **fields}
        assert client.post("/v1/completions", json=body).status_code == status
