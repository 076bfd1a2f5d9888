"""Weights of a running engine are changed for another checkpoint's; and random ones where there are none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.api import Engine
from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import launch
from runtime.protocol.errors import BadRequest, ModelLoadError
from runtime.server.app import build_app
from tests.process.runtime.api.conftest import CHATML, write_model, write_tokenizer
from tests.process.runtime.server.conftest import listening

PROMPTS = ["The quick brown fox", "She said: ", "The quick brown fox jumps"]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
WORDS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_total_tokens": 2048}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other")
    write_model(folder, seed=5)
    write_tokenizer(folder, 380, chat_template=CHATML)
    return folder


@pytest.fixture(scope="module", params=[{"runner_process": False}, {"tp_size": 2}], ids=["here", "ranks"])
def running(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Engine]:
    with Engine(str(checkpoint), **WORDS, **request.param) as made:
        yield made


def texts(engine: Engine) -> list[str]:
    return [str(one["text"]) for one in engine.generate(PROMPTS, GREEDY)]


@pytest.fixture(scope="module")
def wanted(other: Path) -> list[str]:
    with Engine(str(other), **WORDS, runner_process=False) as fresh:
        return texts(fresh)


def test_what_follows_is_the_other_models(
    running: Engine, checkpoint: Path, other: Path, wanted: Any
) -> None:
    before = texts(running)
    assert before != wanted
    running.update_weights_from_disk(str(other))
    assert texts(running) == wanted  # nothing of the prefixes' KV was kept
    with pytest.raises(ModelLoadError, match="no such directory"):
        running.update_weights_from_disk(str(other / "none"))
    assert texts(running) == wanted
    running.update_weights_from_disk(str(checkpoint))
    assert texts(running) == before


def test_another_shape_is_refused(running: Engine, tmp_path: Path) -> None:
    before = texts(running)
    write_model(tmp_path, vocab=400)
    with pytest.raises(ModelLoadError, match="another shape than the model that runs: vocab_size differ"):
        running.update_weights_from_disk(str(tmp_path))
    assert texts(running) == before


def test_requests_in_hand_go_on(running: Engine, checkpoint: Path, other: Path) -> None:
    long = {**GREEDY, "max_new_tokens": 200}
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(running.generate, prompt, long) for prompt in PROMPTS]
        running.update_weights_from_disk(str(other))
        for one in asked:
            assert one.result(300)["meta_info"]["completion_tokens"] == 200
    assert running.flush_cache()
    running.update_weights_from_disk(str(checkpoint))


def test_the_route(checkpoint: Path, other: Path, wanted: list[str]) -> None:
    pipeline, config = (
        launch(EngineConfig(model=str(checkpoint), **WORDS, runner_process=False)),
        ServerConfig(),
    )
    path = "/update_weights_from_disk"
    try:
        app = build_app(pipeline.manager, config)
        with listening(app, config) as server, httpx.Client(base_url=server.url, timeout=300) as client:
            made = client.post(path, json={"model_path": str(other), "load_format": None})
            assert (made.status_code, made.json()["success"]) == (200, True)
            answers = client.post("/generate", json={"text": PROMPTS, "sampling_params": GREEDY}).json()
            assert [one["text"] for one in answers] == wanted
            assert client.get(path).status_code == 405
            assert client.post(path, json={"model_path": str(other), "flush_cache": False}).status_code == 400
            for folder in (str(other / "none"), "~nobody-of-this-name/x", "a\0b", ""):
                missing = client.post(path, json={"model_path": folder})
                assert missing.status_code == 400, missing.text
            assert "no such directory" in client.post(path, json={"model_path": "~nobody/x"}).text
    finally:
        pipeline.close()


def test_random_weights_need_no_files(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    made = []
    for _ in range(2):
        with Engine(str(tmp_path), **WORDS, load_format="dummy", runner_process=False) as engine:
            made.append(texts(engine))
    assert made[0] == made[1]
    with pytest.raises(BadRequest, match="load_format: must be one of auto, dummy"):
        Engine(str(tmp_path), load_format="pt")
