"""The examples run as they are written, on the bundled checkpoint (one engine for all that have one)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

import sglang_dsl as sgl
from runtime.api import Engine
from tests.e2e.patience import PROGRAM_S

FOLDER = Path(__file__).parents[2] / "examples"
FILES = sorted(FOLDER.glob("[0-9]*.py"))
# A line of each example's output that any run of it has.
SAID = {
    "01_first_program": "prompt tokens came from the cache",
    "02_chat_two_turns": "user: And what is its capital called?",
    "03_fork_and_select": "chosen among",
    "04_regex_fields": "'job': ",
    "05_batch_and_stream": "BackendError: prompt",
    "06_remote": "refused (400): ",
    "07_character_sheet": "Mobi of Caturn, 42 years old, works as a potter",
    "08_async_and_branches": "no winner: none of 6 branches was accepted: 6 were refused",
    "09_record_and_replay": "the same again: True\nreplayed: True - 4 calls\nnot there: this call is not in",
    "10_react": """\
Question:    What is the weather in Lisbon?
Action:      get_weather {"city": "Lisbon"}
Observation: {"degrees": 21, "sky": "sun"}
Answer:      The weather in Lisbon is sun with 21 degrees.
Question:    Book a table for 4 in Lisbon.
Action:      book_table {"city": "Lisbon", "people": 4}
Observation: {"table": 12}
Answer:      Table 12 in Lisbon is booked for 4 people.

Question:    What is the weather in Oslo?
Action:      get_weather {"city": "Oslo"}
Observation: {"degrees": 3, "sky": "snow"}
Answer:      The weather in Oslo is snow with 3 degrees.
Question:    Set a timer for 40 minutes.
Action:      set_timer {"minutes": 40}
Observation: {"status": "ok"}
Answer:      The timer is set for 40 minutes.
""",
    "11_parallel_tools": "3 tools at once, 6 calls of the model",
}
REMOTE = {"06_remote"}
"""Those that start a server instead of an engine."""


@pytest.mark.parametrize("file", [file for file in FILES if file.stem in REMOTE], ids=lambda file: file.stem)
def test_a_remote_example_runs(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=PROGRAM_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert SAID[file.stem] in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize(
    "file", [file for file in FILES if file.stem not in REMOTE], ids=lambda file: file.stem
)
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
