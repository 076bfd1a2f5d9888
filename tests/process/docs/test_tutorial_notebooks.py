"""The notebooks of the tutorials: each executes from clean and prints what is kept in its file, and the files
are fit to be read elsewhere. `make notebooks` makes the outputs anew."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.process.terminal import ROOT

NOTEBOOKS = ROOT / "tutorials" / "notebooks"
ROOMS = sorted(one for one in NOTEBOOKS.iterdir() if one.is_dir())
FILES = sorted(NOTEBOOKS.rglob("*.ipynb"))
MOST_FILES, MOST_BYTES = 15, 100_000
OF_A_MACHINE = re.compile(
    r"/(?:home|root|tmp|work|Users|private|var)/|[A-Z]:\\\\|site-packages|\b0x[0-9a-f]{6,}"
)
"""Paths and addresses that are others elsewhere."""


def check(*given: Path, timeout: float) -> None:
    done = subprocess.run(
        [sys.executable, ".ci/notebooks.py", "--check", *map(str, given)],
        cwd=ROOT, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_notebook_is_fit_to_be_read_elsewhere(file: Path) -> None:
    notebook: Any = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert file.stat().st_size < MOST_BYTES

    first, *cells = notebook.cells
    assert first.cell_type == "markdown"
    assert first.source.startswith("# ")
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert outputs
    for output in outputs:
        assert output.output_type in ("stream", "execute_result", "display_data")
        assert output.get("name", "stdout") == "stdout", output.text
        text = output.get("text") or "".join(str(one) for one in output.get("data", {}).values())
        assert not OF_A_MACHINE.search(text), text


def test_each_folder_has_few_files_and_each_notebook_a_page() -> None:
    for room in ROOMS:
        names = [file.name for file in FILES if file.parent == room]
        assert 0 < len(names) <= MOST_FILES
        assert [int(name[:2]) for name in names] == list(range(1, len(names) + 1))
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = [line.rpartition(": ")[2] for line in nav.splitlines() if ": notebooks/" in line]
    pages = [str(file.relative_to(NOTEBOOKS.parent).with_suffix(".md").as_posix()) for file in FILES]
    assert sorted(listed) == pages


def test_what_is_stale_is_told() -> None:
    """By the comparison on which the tests above rely."""
    v4: Any = nbformat.v4

    def printed(text: str, **metadata: Any) -> Any:
        output = v4.new_output("stream", name="stdout", text=text)
        return v4.new_notebook(cells=[v4.new_code_cell("print(x)", outputs=[output], metadata=metadata)])

    spec = importlib.util.spec_from_file_location("ci_notebooks", ROOT / ".ci" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.stale(printed("42\n"), printed("42\n")) == []
    assert module.stale(printed("41\n"), printed("42\n")) == ["cell 0: kept '41\\n', now '42\\n'"]
    assert module.stale(printed("41\n"), printed("42\n", tags=["varies"])) == []
