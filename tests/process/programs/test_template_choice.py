"""Engines on copies of the bundled checkpoint that say less about their format, and programs over them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

import runtime.pocket
import sglang_dsl as sgl
from runtime.api import Engine
from runtime.formats.chat import matching, register_chat_template_matching_function
from sglang_dsl.backends.engine import EngineBackend
from sglang_dsl.errors import BackendError

BUNDLED = Path(runtime.pocket.__file__).parent / "checkpoint"


@sgl.function
def ask(s: Any) -> None:
    s += sgl.user("Which river runs through Ostrel?")
    s += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0))


@sgl.function
def complete(s: Any) -> None:
    s += "The river is called" + sgl.gen("answer", max_tokens=4, temperature=0)


def bare(folder: Path) -> Path:
    """The bundled checkpoint without its Jinja template."""
    shutil.copytree(BUNDLED, folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    assert config.pop("chat_template")
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


def start(folder: Path, **words: Any) -> Engine:
    return Engine(str(folder), max_total_tokens=2048, **words)


def test_its_tokens_and_its_end_token_say_the_format(
    tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    expected = ask.run(backend=EngineBackend(engine))["answer"]
    with (
        caplog.at_level(logging.INFO, logger="runtime.processes.templates"),
        start(bare(tmp_path / "mine")) as known,
    ):
        assert (known.template_choice.source, known.template_choice.name) == ("checkpoint marks", "chatml")
        assert known.state()["chat_template"]["shape"] == "prefixes"
        assert ask.run(backend=EngineBackend(known))["answer"] == expected
    assert "chatml (checkpoint marks)" in caplog.text


def test_a_base_checkpoint_completes_text_and_refuses_turns(tmp_path: Path, engine: Engine) -> None:
    folder = bare(tmp_path / "mine-base")
    with start(folder) as base:
        backend = EngineBackend(base)
        assert base.template_choice.source == "none"
        assert backend.chat_template is None
        assert complete.run(backend=backend)["answer"]
        state = ask.run(backend=backend)
        with pytest.raises(BackendError, match="mine-base") as caught:
            state["answer"]
        error = caught.value
        assert error.status == 400
        assert error.source is not None
        assert error.source.file == __file__
        for way in ('chat_template="chatml"', ".jinja", "register_chat_template_matching_function"):
            assert way in str(error.hint)
        assert complete.run(backend=backend)["answer"]
    with start(folder, chat_template="chatml") as dressed:
        expected = ask.run(backend=EngineBackend(engine))["answer"]
        assert ask.run(backend=EngineBackend(dressed))["answer"] == expected


def test_a_matching_function_is_a_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "_FUNCTIONS", [])
    register_chat_template_matching_function(lambda path: "chatml" if "mine-base" in path else None)
    with start(bare(tmp_path / "mine-base")) as known:
        assert (known.template_choice.source, known.template_choice.name) == ("model name", "chatml")
        assert ask.run(backend=EngineBackend(known))["answer"]


def test_a_link_goes_by_the_name_it_was_called_by(tmp_path: Path) -> None:
    folder = bare(tmp_path / "0123abcd-base")
    (tmp_path / "Qwen3-8B").symlink_to(folder)
    with start(tmp_path / "Qwen3-8B") as known:
        assert known.template_choice.source == "checkpoint marks"
    (tmp_path / "vicuna-7b-v1.5-base").symlink_to(folder)
    with start(tmp_path / "vicuna-7b-v1.5-base") as unknown:
        assert unknown.template_choice.source == "none"
