"""The benchmark programs still run: the small mode of those that have one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.e2e.patience import PROGRAM_S

ROOT = Path(__file__).resolve().parents[2]


def test_grammar_benchmark_in_small(tmp_path: Path) -> None:
    text = ROOT / "runtime" / "grammar"
    command = ["benchmarks/grammar.py", "--quick", "--write", "--sizes", "2000", "--text", text]
    done = subprocess.run(
        [sys.executable, *command, "--folder", tmp_path, "--results", tmp_path],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "SGLANG_DSL_DATA"},
    )
    assert done.returncode == 0, done.stderr
    (report,) = tmp_path.glob("*-grammar.md")
    rows = [
        line.split(" | ") for line in report.read_text().splitlines() if line.startswith(("| R1", "| J1"))
    ]
    assert [row[1] for row in rows] == ["auto", "llguidance library"] * 2
    for row in rows:
        assert all(float(cell) >= 0 for cell in row[2:9]), row
        assert "not allowed" not in row[-1]
