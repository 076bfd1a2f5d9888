"""The examples run as they are written, on the bundled checkpoint (one engine for all of them)."""

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from pathlib import Path

import pytest

import sglang_dsl as sgl
from runtime.api import Engine

FOLDER = Path(__file__).parents[2] / "examples"
FILES = sorted(FOLDER.glob("[0-9]*.py"))
# A line of each example's output that any run of it has.
SAID = {
    "01_first_program": "prompt tokens came from the cache",
    "02_chat_two_turns": "user: And what is its capital called?",
    "03_fork_and_select": "chosen among",
    "04_regex_fields": "'job': ",
    "05_batch_and_stream": "BackendError: prompt",
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_runs(file: Path, engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.Engine = lambda model: nullcontext(engine)
    try:
        module.main()
    finally:
        sgl.set_default_backend(None)
    assert SAID.get(file.stem, "") in capsys.readouterr().out


def test_there_are_examples() -> None:
    assert {file.stem for file in FILES} >= set(SAID)
