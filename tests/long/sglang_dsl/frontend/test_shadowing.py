"""Another module called `runtime` on the import path: one line says which, and it is never run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.patience import PROGRAM_S

ROOT = Path(__file__).resolve().parents[4]
FILE = "runtime.py"
PACKAGE = "runtime/__init__.py"
INSTALLED = "lib/site-packages/runtime/__init__.py"


def python(folder: Path, *arguments: str, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=PROGRAM_S,
        check=False, env={**os.environ, "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "advice"),
    [
        (FILE, ("-c", "import sglang_dsl"), "another name"),
        (FILE, ("-c", "from sglang_dsl.backends.mock import MockBackend"), "another name"),
        (FILE, ("-m", "sglang_dsl", "demo"), "another name"),
        (FILE, ("program.py",), "another name"),
        (FILE, ("runtime.py",), "another name"),
        (PACKAGE, ("-c", "import sglang_dsl"), "another name"),
        (PACKAGE, ("program.py",), "another name"),
        (INSTALLED, ("program.py",), "uninstall"),
    ],
)
def test_what_stands_in_the_way_is_told(
    tmp_path: Path, name: str, arguments: tuple[str, ...], advice: str
) -> None:
    other = tmp_path / name
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("print('it ran')\nimport sglang_dsl\n")
    (tmp_path / "program.py").write_text("import sglang_dsl\n")
    done = python(tmp_path, *arguments, path=tmp_path / "lib" / "site-packages")
    assert done.returncode == 1
    assert done.stdout.count("it ran") == (arguments == ("runtime.py",)), done.stdout
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: sglang_dsl needs its own package `runtime`")
    assert str(other) in last
    assert advice in last


def test_one_that_is_loaded_already_is_told(tmp_path: Path) -> None:
    code = "import sys, types; sys.modules['runtime'] = types.ModuleType('runtime'); import sglang_dsl"
    last = python(tmp_path, "-c", code).stderr.splitlines()[-1]
    assert "comes first: made in memory" in last


def test_a_folder_of_that_name_is_no_module(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "data.txt").write_text("x")
    done = python(tmp_path, "-c", "import sglang_dsl; print(sglang_dsl.gen('x'))")
    assert done.returncode == 0, done.stderr


def test_a_server_of_the_program_s_own_is_never_the_other_one(tmp_path: Path) -> None:
    """The program stands elsewhere; the other module only where it is started."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "program.py").write_text(
        "import sglang_dsl as sgl\n"
        "with sgl.Runtime('pocket') as served:\n"
        "    sgl.set_default_backend(served)\n"
        "    print(sgl.get_server_info()['model_path'].rpartition('/')[2])\n"
    )
    (tmp_path / "runtime.py").write_text("print('it ran')\n")
    done = python(tmp_path, "home/program.py")
    assert (done.returncode, done.stdout) == (0, "checkpoint\n"), done.stderr
