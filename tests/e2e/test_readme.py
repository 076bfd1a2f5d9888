"""The README's program runs as printed, and its commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_first_program_runs_as_printed(tmp_path: Path) -> None:
    program = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert program is not None
    file = tmp_path / "first.py"
    file.write_text(program[1], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Sarn.", "positive"]


def test_every_make_verb_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = set(re.findall(r"`?make ([a-z]+)", README))
    assert verbs >= {"demo", "test", "check", "bench"}
    for verb in verbs:
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb


def test_every_module_it_names_has_help() -> None:
    for module in sorted(set(re.findall(r"python -m ([a-z_.]+)", README))):
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            capture_output=True,
            text=True,
            timeout=100,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0, (module, done.stderr)
        assert "usage" in done.stdout
