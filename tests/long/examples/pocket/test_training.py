"""unit/examples/pocket/test_training.py, at length."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.pocket import path
from tests.process.patience import PROGRAM_S


def test_a_run_without_the_time_to_learn_says_so_and_replaces_nothing(tmp_path: Path) -> None:
    folder, work = tmp_path / "checkpoint", tmp_path / "work"
    folder.mkdir()
    shutil.copy(path() / "tokenizer.json", folder)
    words = [
        "--minutes",
        "0.05",
        "--tokens",
        "512",
        "--items",
        "4",
        "--folder",
        str(folder),
        "--work",
        str(work),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "examples.pocket.train", *words],
        capture_output=True, text=True, timeout=PROGRAM_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(r"^took [\d.]+ minutes with 2 workers: \d+ steps", done.stdout, re.MULTILINE)
    assert re.search(r"^facts .* missed$", done.stdout, re.MULTILINE)
    assert not (folder / "model.safetensors").exists()
    assert (work / "model.safetensors").exists()
