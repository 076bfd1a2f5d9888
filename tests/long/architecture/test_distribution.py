"""What is handed on: the sdist holds all that a reader needs to check it, the wheel what a program needs to
run; and no pin is in the way of a public index."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.process.patience import PROGRAM_S

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("runtime", "sglang_dsl")
BESIDE = ("tests", "examples", "tutorials", "benchmarks", ".ci")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so", "build", ".cache", ".DS_Store")
BUILT = "runtime/kernels/native/built.abi3.so"


def build(kind: str, source: Path, out: Path, **environment: str) -> Path:
    """The file that `kind` of distribution is, made of the tree at `source`."""
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta; build_meta.build_{kind}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [made] = out.iterdir()
    return made


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of this checkout, nothing that was made in it."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in (*PACKAGES, *BESIDE):
        shutil.copytree(ROOT / folder, tree / folder, ignore=LEFT_OUT)
    for file in ROOT.iterdir():
        if file.is_file() and file.name != ".git":
            shutil.copy(file, tree)
    return tree


def files(folder: Path, below: tuple[str, ...]) -> set[str]:
    return {
        str(file.relative_to(folder))
        for name in below
        for file in (folder / name).rglob("*")
        if file.is_file()
    }


@pytest.mark.timeout(2 * PROGRAM_S)
def test_the_sdist_is_whole_and_the_wheel_made_of_it_runs(tree: Path, tmp_path: Path) -> None:
    expected = files(tree, (*PACKAGES, *BESIDE))
    with tarfile.open(build("sdist", tree, tmp_path / "sdist")) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    [unpacked] = (tmp_path / "unpacked").iterdir()
    assert files(unpacked, (*PACKAGES, *BESIDE)) == expected
    pages = {"README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert pages | {"Makefile", "LICENSE", "pyproject.toml"} <= {file.name for file in unpacked.iterdir()}

    compiles = shutil.which("cc") is not None
    made = build("wheel", unpacked, tmp_path / "wheel")
    assert re.search(r"-cp311-abi3-\w+\.whl$", made.name)  # of one platform, for all versions of Python
    with zipfile.ZipFile(made) as wheel:
        named = [name for name in wheel.namelist() if ".dist-info/" not in name]
        wheel.extractall(tmp_path / "installed")
    assert set(named) == files(tree, PACKAGES) | ({BUILT} if compiles else set())
    code = """
import sglang_dsl as sgl
from runtime.kernels.native.library import library
native = library()
print(sgl.__file__, sgl.Engine('pocket').close(), native and native.path)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "installed", capture_output=True, text=True,
        timeout=PROGRAM_S, check=False, env={**os.environ, "CC": "no-such-compiler", "PYTHONPATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "installed") in done.stdout
    assert (str(tmp_path / "installed" / BUILT) in done.stdout) == compiles  # nothing else could compile it


@pytest.mark.timeout(PROGRAM_S)
def test_without_a_compiler_the_wheel_has_the_source_alone(tree: Path, tmp_path: Path) -> None:
    shutil.copytree(tree, tmp_path / "tree")
    with zipfile.ZipFile(build("wheel", tmp_path / "tree", tmp_path / "wheel", CC="false")) as wheel:
        assert {name for name in wheel.namelist() if ".dist-info/" not in name} == files(tree, PACKAGES)


def test_nothing_is_pinned_that_torch_pins_itself() -> None:
    """Its builds for CPU and for CUDA ask for different releases of these."""
    pins = (ROOT / ".ci" / "constraints.txt").read_text(encoding="utf-8").split()
    assert len(pins) > 50
    assert all(re.fullmatch(r"[\w.-]+==[\w.+!]+", pin) for pin in pins), pins
    assert [pin for pin in pins if re.match(r"(pytorch-)?triton|nvidia|cuda|cupti", pin.lower())] == []
