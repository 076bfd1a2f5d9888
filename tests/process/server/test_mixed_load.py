"""The benchmark of free requests beside constrained ones runs, and all its requests are answered."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.process.patience import PROGRAM_S

ROOT = Path(__file__).resolve().parents[3]


def test_quick_mode():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.grammars.mixed_load", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "| failed | 0 | 0 |" in done.stdout, done.stdout
    assert "Throughput of the free requests" in done.stdout
