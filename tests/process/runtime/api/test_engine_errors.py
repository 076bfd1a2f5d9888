"""What a user is told when something is wrong; the engine goes on serving."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runtime.api import Engine
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import (
    BadConstraint,
    BadRequest,
    ModelLoadError,
    PromptTooLong,
    RuntimeFault,
    TemplateError,
)
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message


def _truncated_config(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text[: len(text) // 2])


def _truncated_weights(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _smaller_embedding(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": ')


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def _unknown_architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["UnheardOfForCausalLM"]}))


@pytest.mark.parametrize(
    ("harm", "where", "says"),
    [
        (_truncated_config, "config.json", "JSON"),
        (_unknown_architecture, "config.json", "UnheardOf"),
        (_truncated_weights, "model.safetensors", ""),
        (_no_weights, "", "safetensors"),
        (_smaller_embedding, "tokenizer.json", "300"),
        (_broken_tokenizer, "tokenizer.json", "JSON"),
        (_no_tokenizer, "tokenizer.json", "missing"),
    ],
)
def test_broken_checkpoints(
    tmp_path: Path, checkpoint: Path, harm: Callable[[Path], None], where: str, says: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(checkpoint, folder)
    harm(folder)
    with pytest.raises(ModelLoadError) as caught:
        Engine(str(folder), device="cpu", max_total_tokens=512)
    assert where in str(caught.value.where)
    assert str(folder) in str(caught.value)
    assert says in str(caught.value)


def test_an_unknown_model_names_the_path_and_the_bundled_ones() -> None:
    with pytest.raises(ModelLoadError, match=r"/no/such/model.*pocket"):
        Engine("/no/such/model")


def test_wrong_options_are_named() -> None:
    with pytest.raises(BadRequest, match=r"page_sise.*page_size"):
        Engine("pocket", page_sise=4)
    with pytest.raises(BadRequest, match=r"page_size"):
        Engine("pocket", page_size="four")
    with pytest.raises(BadRequest, match=r"page_size"):
        Engine("pocket", page_size=0)
    with pytest.raises(BadRequest, match=r"dtype"):
        Engine("pocket", dtype="int3")


def test_more_context_than_the_model_has(checkpoint: Path) -> None:
    with pytest.raises(BadRequest, match=r"context_length.*513.*512"):
        Engine(str(checkpoint), context_length=513)


def test_an_unknown_chat_template(checkpoint: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nonsense.*chatml"):
        Engine(str(checkpoint), chat_template="nonsense")


TURNS = GenerateReqInput(messages=[Message("user", "hi"), Message("assistant", open=True)])
WRONG: list[tuple[Any, dict[str, Any], type[RuntimeFault], str, str]] = [
    ("a", {"constraint": Constraint("regex", "(a")}, BadConstraint, "regex", ""),
    ("a", {"constraint": Constraint("json_schema", "{")}, BadConstraint, "json_schema", ""),
    ("a", {"choices": []}, BadRequest, "choices", "at least one"),
    ("the dog " * 600, {}, PromptTooLong, "prompt", "512"),
    ("a", {"sampling_params": {"top_p": 7}}, BadRequest, "sampling_params.top_p", "7"),
    ("a", {"sampling_params": {"tempreature": 0}}, BadRequest, "sampling_params", "tempreature"),
    (
        "a",
        {"sampling_params": {"max_new_tokens": "many"}},
        BadRequest,
        "sampling_params.max_new_tokens",
        "int",
    ),
    ("a", {"regexp": "a"}, BadRequest, "generate", "regexp"),
    (7, {}, BadRequest, "prompt", "int"),
    ([99999], {}, BadRequest, "input_ids[0]", "99999"),
]


@pytest.mark.parametrize(("prompt", "fields", "kind", "where", "says"), WRONG)
def test_wrong_requests_and_then_a_right_one(
    engine: Engine, prompt: Any, fields: dict[str, Any], kind: type[RuntimeFault], where: str, says: str
) -> None:
    with pytest.raises(kind) as caught:
        engine.generate(prompt, **fields)
    assert where in str(caught.value.where)
    assert says in str(caught.value)
    assert engine.generate("a", {"max_new_tokens": 2, "ignore_eos": True}).meta["completion_tokens"] == 2


def test_a_failing_item_of_a_list(engine: Engine) -> None:
    long = "the dog " * 600
    params = {"temperature": 0, "max_new_tokens": 3}
    with pytest.raises(PromptTooLong):
        engine.generate(["a", long, "b"], params)
    outcomes = engine.generate(["a", long, "b"], params, on_error="return")
    assert isinstance(outcomes[1], PromptTooLong)
    assert not isinstance(outcomes[0], RuntimeFault)
    assert outcomes[0].text == engine.generate("a", params).text
    with pytest.raises(BadRequest, match="2 for 3"):
        engine.generate(["a", "b", "c"], [{}, {}])


def test_turns_without_a_template(tmp_path: Path, checkpoint: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(checkpoint, folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with Engine(str(folder), device="cpu", max_total_tokens=512) as known:
        # Its tokens are ChatML's and it ends with <|im_end|>.
        assert known.template_choice.source == "checkpoint marks"
        assert known.generate(TURNS, {"max_new_tokens": 1}).output_ids
    for name, field, value in (
        ("tokenizer_config.json", "eos_token", "<|endoftext|>"),
        ("config.json", "eos_token_id", 0),
        ("generation_config.json", "eos_token_id", 0),
    ):
        if (folder / name).is_file():
            data = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(data | {field: value}))
    with Engine(str(folder), device="cpu", max_total_tokens=512) as bare:
        assert bare.chat_template is None
        state = bare.state()["chat_template"]
        assert (state["source"], state["name"], state["shape"]) == ("none", None, None)
        with pytest.raises(TemplateError, match=r"chatml") as caught:
            bare.generate(TURNS)
        assert caught.value.status == 400
        assert "register_chat_template_matching_function" in str(caught.value)
        assert "'bare'" in str(caught.value)
        assert bare.generate("a", {"max_new_tokens": 1}).output_ids
    (tmp_path / "own.jinja").write_text("{% for m in messages %}{{ m.content }}|{% endfor %}")
    for template in ("chatml", str(tmp_path / "own.jinja")):
        with Engine(str(folder), device="cpu", max_total_tokens=512, chat_template=template) as dressed:
            assert dressed.generate(TURNS, {"max_new_tokens": 1}).output_ids


def test_a_template_that_cannot_be_parsed_harms_turns_only(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.jinja").write_text("{% for m in messages %}")
    template = str(tmp_path / "broken.jinja")
    with Engine(str(checkpoint), device="cpu", max_total_tokens=512, chat_template=template) as engine:
        with pytest.raises(TemplateError, match="parsed"):
            engine.generate(TURNS)
        assert engine.generate("a", {"max_new_tokens": 1}).output_ids
