"""What the README shows runs as printed, and its commands exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process.patience import PROGRAM_S

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:30000"


def run(program: str, folder: Path) -> str:
    """What the program prints."""
    file = folder / "program.py"
    file.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(file)], capture_output=True, text=True, timeout=PROGRAM_S, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)


def test_the_first_program_runs_as_printed(tmp_path: Path) -> None:
    program = blocks("python")[0]
    assert sum(bool(line.strip()) for line in program.splitlines()) == 10
    assert run(program, tmp_path).split() == ["Sarn.", "positive"]


def test_a_client_of_openais_runs_as_printed(tmp_path: Path, shared_server: Any) -> None:
    program = blocks("python")[1].replace(ADDRESS, shared_server.url)
    assert run(program, tmp_path) == "The river of Ostrel is Sarn.\n"


def test_the_program_runs_on_servers_as_printed(tmp_path: Path, shared_server: Any) -> None:
    first, _, third, _ = blocks("python")
    defined = first[: first.index("state = ")]
    printed = run(defined + third.replace(ADDRESS, shared_server.url), tmp_path).splitlines()
    assert printed[0] == "Sarn. positive"
    assert re.fullmatch(r"[A-Z][a-z]+\.", printed[1])


def test_the_language_runs_as_printed(tmp_path: Path) -> None:
    program = "import sglang_dsl as sgl\n" + blocks("python")[3]
    assert re.fullmatch(r"(Ostrel|Karsk|Hesper) 4\n", run(program, tmp_path))


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_curl_command_runs_as_printed(shared_server: Any) -> None:
    [command] = blocks("sh")
    done = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, shared_server.url)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=True,
    )
    assert '"text":" The ruler of Hesper is Queen Wenna."' in done.stdout


def test_every_make_verb_it_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = set(re.findall(r"`?make ([a-z-]+)", README))
    assert verbs >= {"demo", "test", "check", "bench"}
    for verb in verbs:
        assert re.search(rf"^{verb}:", makefile, re.MULTILINE), verb


PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *ROOT.glob("tutorials/**/*.md"),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_the_pages_name_exists(page: Path) -> None:
    folders = ("runtime", "sglang_dsl", "tests", "tutorials", "examples", "benchmarks")
    known = [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.*")]
    known += [f"/{path.name}" for path in ROOT.glob("*.md")]
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for name in re.findall(r"`([\w/-]+\.(?:py|md))`", text):
        assert any(one.endswith(f"/{name}") for one in known), name


def test_every_module_it_names_has_help() -> None:
    for module in sorted(set(re.findall(r"python -m ([a-z_.]+)", README))):
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"],
            capture_output=True,
            text=True,
            timeout=PROGRAM_S,
            cwd=ROOT,
            check=False,
        )
        assert done.returncode == 0, (module, done.stderr)
        assert "usage" in done.stdout
