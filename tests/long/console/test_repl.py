"""process/console/test_repl.py, at length."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.console.test_repl import RIVER, talk
from tests.process.patience import PATIENCE_S
from tests.process.terminal import CTRL_D, ROOT, terminal


def test_what_is_exported_on_pocket_runs_on_it(tmp_path: Path) -> None:
    with terminal(tmp_path, "--temperature", "0", environment={"PYTHONPATH": str(ROOT)}) as seen:
        seen.shows("pocket is a small model")
        seen.shows("❯")
        seen.runs(RIVER, r"^assistant +.*Sarn")
        seen.runs(":export talk.py", "a program")
        seen.press(CTRL_D)
        assert seen.ends() == 0
    done = subprocess.run(
        [sys.executable, "-P", "talk.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"Sarn", done.stdout)
