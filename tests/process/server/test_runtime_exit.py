"""A program that started a server and ends leaves no connection open behind it, however it ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.process.patience import PROGRAM_S

START = 'import sglang_dsl; rt = sglang_dsl.Runtime("pocket", threads=1, max_total_tokens=2048)\n'
USE = 'assert rt.generate("Hello", {"max_new_tokens": 2})\n'


@pytest.mark.parametrize("end", ["", "rt.shutdown()\n"])
def test_no_warning_when_the_interpreter_ends(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", START + USE + end],
        capture_output=True, text=True, timeout=PROGRAM_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
