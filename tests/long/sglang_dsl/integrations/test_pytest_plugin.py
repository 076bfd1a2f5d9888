"""The plugin of pytest, as pytest finds it: by the entry point of pyproject.toml. A folder of tests is run
with it several times."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
RUN_S = 120
OTHERS = ("cacheprovider", "langsmith_plugin", "schemathesis", "hypothesispytest", "xdist", "anyio")
"""Plugins that would take longer to load than the tests take."""
PROGRAM = """
import sglang_dsl as sgl

@sgl.function
def qa(s, question):
    s += sgl.user(question) + sgl.assistant(sgl.gen("answer"))
"""
TESTS = """
import pytest
from program import qa
from sglang_dsl import NoBackend

def test_mock(sgl_mock):
    mock = sgl_mock(["Paris"])
    assert qa("Where?")["answer"] == "Paris"
    assert len(mock.calls) == 1

def test_the_mock_is_gone():
    with pytest.raises(NoBackend):
        qa("Where?")["answer"]

@pytest.mark.parametrize("place", ["a/b", "c d"])
def test_recorded(sgl_recorded, place):
    assert qa(place, **sgl_recorded)["answer"] == f"heard {place}"
    states = qa.run_batch([(place, ), ("x", )], temperature=0, **sgl_recorded)
    assert [s["answer"] for s in states] == [f"heard {place}", "heard x"]
"""
CONFTEST = """
import pytest
from sglang_dsl import MockBackend

@pytest.fixture(scope="session")
def sgl_record_backend():
    yield MockBackend(lambda call: f"heard {call.prompt.messages[0].content}")
"""


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", "-rN", *(f"-pno:{name}" for name in OTHERS), *arguments],
        cwd=folder, capture_output=True, text=True, timeout=RUN_S, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "site"), str(ROOT)]),
             "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tests, and what an installed package says of itself."""
    points = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    info = tmp_path / "site" / "sglang_dsl-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: sglang-dsl\nVersion: 0.1\n")
    lines = "".join(f"{name} = {target}\n" for name, target in points["pytest11"].items())
    (info / "entry_points.txt").write_text(f"[pytest11]\n{lines}")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    return tmp_path


@pytest.mark.timeout(5 * RUN_S)
def test_mock_record_and_replay(folder: Path) -> None:
    code, said = run(folder)
    assert (code, said.count("there is no recording in recordings/test_it/test_recorded_")) == (1, 2), said
    assert "2 passed, 2 errors" in said
    assert not (folder / "recordings").exists()
    code, said = run(folder, "--sgl-record=new")
    assert code == 0, said
    made = sorted(str(one.relative_to(folder / "recordings")) for one in folder.rglob("*") if one.is_file()
                  if "recordings" in one.parts)  # fmt: skip
    assert made == [f"test_it/test_recorded_{name}/calls.sqlite" for name in ("a_b", "c_d")]

    # Replayed without a backend, and where nothing can be written.
    (folder / "conftest.py").write_text("")
    for one in folder.glob("recordings/test_it/*"):
        one.joinpath("calls.sqlite").chmod(0o444)
        one.chmod(0o555)
    code, said = run(folder)
    assert (code, "4 passed" in said) == (0, True), said

    changed = PROGRAM.replace("sgl.user(question)", 'sgl.user(question + "!")')
    (folder / "program.py").write_text(changed)
    code, said = run(folder)
    assert (code, "2 failed, 2 passed" in said) == (1, True), said
    assert "to record what is not there yet: pytest --sgl-record=new" in said
    for one in folder.glob("recordings/test_it/*"):
        one.chmod(0o755)

    # All of it anew, by another model.
    (folder / "conftest.py").write_text(CONFTEST.replace("heard", "seen"))
    code, said = run(folder, "--sgl-record=all", "-k", "recorded")
    assert (code, "'seen a/b!' == 'heard a/b'" in said) == (1, True), said
