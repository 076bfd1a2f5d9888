"""test_program_types.py, at length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.long.sglang_dsl.frontend.test_program_types import ROOT, TYPES_S, said, wanted

WORDS_PAGE = """
import sglang_dsl as sgl
from sglang_dsl import AsyncProgramState, ProgramState


@sgl.function
def tell(s: ProgramState, question: str, size: int = 2) -> str:
    return question


@sgl.function
async def later(s: AsyncProgramState, question: str) -> int:
    return 1


@sgl.function
def wide(s: ProgramState, *sizes: int, **names: str) -> int:
    return 1


class Guide:
    @sgl.function
    def ask(self, s: ProgramState, question: str) -> float:
        return 0.5


async def runs(backend: sgl.MockBackend) -> None:
    reveal_type(tell.run(question="Who?", backend=backend, temperature=0))  # State[str]
    reveal_type(tell("Who?", 3, timeout=3, max_new_tokens=4).ret_value)  # str
    reveal_type(later.run("Who?", backend=backend))  # State[int]
    reveal_type(await later("Who?", seed=3))  # AsyncState[int]
    reveal_type(Guide().ask("Who?", backend=backend))  # State[float]
    reveal_type(wide(1, 2, backend=backend))  # Any
    reveal_type(tell.options(temperature=0).run("Who?", stream=True))  # State[str]
    tell.run(backend=backend)  # error: call-arg
    tell.run("Who?", temperature="hot", backend=backend)  # error: arg-type
    tell.run("Who?", temprature=0, backend=backend)  # error: call-arg
    tell.run(query="Who?", backend=backend)  # error: call-arg
    tell.stream("Who?", size="3", backend=backend)  # error: arg-type
    tell(3)  # error: arg-type
    tell()  # error: call-arg
    Guide().ask(3, backend=backend)  # error: arg-type
    await later.arun("Who?", cache="always")  # error: arg-type
"""


@pytest.mark.timeout(TYPES_S + 20)
def test_the_plugin_checks_words_and_parameters_together(tmp_path: Path) -> None:
    """In one line each."""
    file, settings = tmp_path / "programs.py", tmp_path / "mypy.ini"
    file.write_text(WORDS_PAGE, encoding="utf-8")
    settings.write_text("[mypy]\nplugins = sglang_dsl.mypy_plugin\nstrict = True\n", encoding="utf-8")
    words = ["--config-file", str(settings), "--follow-imports=silent", "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words, str(file)],
        capture_output=True, text=True, timeout=TYPES_S, check=False, cwd=ROOT,
    )  # fmt: skip
    lines, right = done.stdout.splitlines(), wanted(WORDS_PAGE)
    assert said(lines) == right, done.stdout + done.stderr
    assert len(lines) == len(right), done.stdout
