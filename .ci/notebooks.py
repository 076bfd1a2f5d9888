"""Executes the notebooks of the tutorials and keeps what they print.

    make notebooks                                         # all of them
    python .ci/notebooks.py tutorials/notebooks/learn      # those of a folder, or single files
    python .ci/notebooks.py --check FILE ...               # write nothing; exit code 1 for a stale output

All files of a call share one kernel, which is emptied before each. A cell with the tag "varies" prints
something else each time (seconds, ports): its output is kept, and not compared.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = ROOT / "tutorials" / "notebooks"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
CELL_S = 300
EMPTY = """\
get_ipython().run_line_magic("reset", "-f")
import sglang_dsl
sglang_dsl.set_default_backend(None)
del sglang_dsl
"""


def files(given: Sequence[Path]) -> list[Path]:
    """The notebooks below these folders, and single files as they are."""
    found = [sorted(one.rglob("*.ipynb")) if one.is_dir() else [one] for one in given]
    return [file for part in found for file in part]


def executed(given: Sequence[Path]) -> Iterator[tuple[Path, Any]]:
    """Each file, and the notebook as it is after its cells ran in a temporary folder."""
    from nbclient import NotebookClient

    v4: Any = nbformat.v4
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "IPYTHONDIR": str(Path(folder) / ".ipython"),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
            "NO_COLOR": "1",
        }
        # With it a kernel takes itself for a test, and gives cells a stderr that no process can inherit.
        environment.pop("PYTEST_CURRENT_TEST", None)
        client = NotebookClient(
            v4.new_notebook(), timeout=CELL_S, kernel_name="python3", coalesce_streams=True
        )
        with client.setup_kernel(cwd=folder, env=environment):
            for file in given:
                client.nb = v4.new_notebook(cells=[v4.new_code_cell(EMPTY)])
                client.execute_cell(client.nb.cells[0], 0, store_history=False)
                client.nb = notebook = nbformat.read(file, as_version=4)
                client.reset_execution_trackers()
                count = 0
                for index, cell in enumerate(notebook.cells):
                    if cell.cell_type == "code":
                        count += 1
                        client.execute_cell(cell, index, execution_count=count)
                        cell.execution_count = count
                yield file, tidy(notebook)


def tidy(notebook: Any) -> Any:
    """Without what says when, where and by which version it was executed."""
    notebook.metadata = nbformat.from_dict(METADATA)
    number = 0
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if cell.cell_type == "code":
            number += 1
            cell.execution_count = number
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = number
                if "metadata" in output:
                    output.metadata = nbformat.from_dict({})
    return notebook


def text_of(output: Any) -> str:
    """What an output says in plain text."""
    if output.output_type == "stream":
        return str(output.text)
    return str(output.get("data", {}).get("text/plain", ""))


def stale(kept: Any, now: Any) -> list[str]:
    """What differs between the outputs that are kept and those of now, in words."""
    found = []
    for number, (old, new) in enumerate(zip(kept.cells, now.cells, strict=True)):
        if new.cell_type != "code" or "varies" in new.metadata.get("tags", ()):
            continue
        before, after = ([text_of(output) for output in cell.outputs] for cell in (old, new))
        if before != after:
            found.append(f"cell {number}: kept {''.join(before)!r}, now {''.join(after)!r}")
    return found


# -- pages of the site ---------------------------------------------------------------------------------------


def page(notebook: Any, name: str) -> str:
    """A notebook as a page in Markdown: text, code, outputs. name: of its file, which the page links to."""
    title, *cells = notebook.cells
    head, _, rest = title.source.partition("\n")
    parts = [head, f"[This page as a notebook]({name})", rest.strip()]
    for cell in cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
        else:
            parts.append(f"```python\n{cell.source}\n```")
            parts += [_output(output) for output in cell.outputs]
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: Any) -> str:
    data = output.get("data", {})
    for kind in ("text/html", "image/svg+xml"):
        if kind in data:
            # Markdown ends a block of HTML at an empty line.
            whole = re.sub(r"\n\s*\n", "\n", data[kind].strip())
            return f"<div>\n{whole}\n</div>"
    return f"```text\n{text_of(output).rstrip()}\n```"


def pages() -> dict[str, str]:
    """The page of each notebook, by its place below tutorials/."""
    made = {}
    for file in files([NOTEBOOKS]):
        target = file.relative_to(NOTEBOOKS.parent).with_suffix(".md").as_posix()
        made[target] = page(nbformat.read(file, as_version=4), file.name)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description="Execute the notebooks and keep what they print.")
    parser.add_argument("--check", action="store_true", help="write nothing; say which outputs are stale")
    parser.add_argument("files", nargs="*", type=Path, default=[NOTEBOOKS])
    args = parser.parse_args()
    found = files(args.files)
    if wrong := [str(file) for file in found if file.suffix != ".ipynb"]:
        parser.error(f"no notebook: {', '.join(wrong)}")
    failed = False
    for file, notebook in executed(found):
        name = file.resolve().relative_to(ROOT).as_posix()
        changes = stale(nbformat.read(file, as_version=4), notebook)
        if args.check:
            for change in changes:
                print(f"{name}: {change}")
            failed = failed or bool(changes)
        else:
            nbformat.write(notebook, file)
            print(f"{name}: {len(changes)} outputs changed")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
