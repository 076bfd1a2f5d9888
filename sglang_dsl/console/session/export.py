"""A session as a program that can be run, or as a notebook: the cells that count, on the same backend. What
was taken back is in neither.
"""

from __future__ import annotations

import ast
import io
import json
import tokenize
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sglang_dsl as sgl
from runtime.protocol.registry import MissingExtra
from sglang_dsl.console.session.opening import Place
from sglang_dsl.console.session.saved import write
from sglang_dsl.console.session.session import Cell, Session
from sglang_dsl.errors import BadProgram

_TITLE = "A session of sglang-dsl."


def export(session: Session, path: Path) -> str:
    """Write `path`: a program for .py, a notebook for .ipynb. What it is. Raises BadProgram, MissingExtra."""
    counted = session.counted()
    if not counted:
        raise BadProgram("nothing to export: no cell was run")
    match path.suffix:
        case ".py":
            write(path, program(counted, session.place, session.words).encode(), 0o666)
            return "a program"
        case ".ipynb":
            write(path, notebook(counted, session.place, session.words).encode(), 0o666)
            return "a notebook"
        case _:
            raise BadProgram(f"{path} must end with .py or .ipynb")


def program(cells: Sequence[Cell], place: Place, words: dict[str, object]) -> str:
    """A module: the imports, the cells as one program, and a main that runs it and shows its state."""
    imports, opened = place.source()
    given = "".join(f", {name}={value!r}" for name, value in words.items())
    body, own = [], []
    for one in cells:
        code, lifted = _without_imports(one.code)
        own += lifted
        if one.stopped:
            body.append("# The answer was stopped before its end.")
        if code.strip():
            body.append(code.strip("\n"))
    inner = "\n\n".join(_indented(part) for part in body) or "    pass"
    used = {node.id for one in cells for node in ast.walk(ast.parse(one.code)) if isinstance(node, ast.Name)}
    words_used = ", ".join(sorted(used & set(sgl.__all__)))
    own = [f"from sglang_dsl import {words_used}", *own] if words_used else own
    lifted_lines = "".join(f"{line}\n" for line in dict.fromkeys(own))
    return (
        f'"""{_TITLE}"""\n\nimport sglang_dsl as sgl\n{imports}\n{lifted_lines}\n\n'
        f"@sgl.function\ndef session(s):\n{inner}\n\n\n"
        f'if __name__ == "__main__":\n    backend = {opened}\n'
        "    sgl.set_default_backend(backend)\n    try:\n"
        f"        session.run(backend=backend{given}).show()\n    finally:\n        backend.close()\n"
    )


def notebook(cells: Sequence[Cell], place: Place, words: dict[str, object]) -> str:
    """A notebook whose cells are those of the session, run by the extension for IPython. Raises
    MissingExtra."""
    try:
        import nbformat

        v4: Any = nbformat.v4
    except ImportError as error:
        raise MissingExtra("a notebook needs nbformat: pip install 'sglang-dsl[repl]'") from error
    begin = ["%load_ext sglang_dsl", f"%sgl backend {place.line}"]
    begin += [f"%sgl set {name}={value}" for name, value in words.items()]
    made = v4.new_notebook(
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
        },
        cells=[
            v4.new_markdown_cell(f"# {_TITLE.rstrip('.')}", id="title"),
            v4.new_code_cell("\n".join(begin), id="begin"),
            *(v4.new_code_cell(f"%%sgl\n{one.code}", id=f"cell-{at}") for at, one in enumerate(cells, 1)),
        ],
    )
    nbformat.validate(made)
    return f"{json.dumps(made, ensure_ascii=False, indent=1)}\n"


def _without_imports(code: str) -> tuple[str, list[str]]:
    """The code without the imports at its top level, which a function's body may not all have; and these."""
    lines = code.split("\n")
    lifted: list[str] = []
    taken: set[int] = set()
    statements = ast.parse(code).body
    for at, one in enumerate(statements):
        if not isinstance(one, ast.Import | ast.ImportFrom):
            continue
        span = range(one.lineno - 1, one.end_lineno or one.lineno)
        alone = all(other.lineno - 1 not in span and (other.end_lineno or 0) - 1 not in span
                    for place, other in enumerate(statements) if place != at)  # fmt: skip
        if alone:
            lifted.append(ast.unparse(one))
            taken.update(span)
    return "\n".join(line for at, line in enumerate(lines) if at not in taken), lifted


def _indented(code: str) -> str:
    """Four spaces deeper; lines that begin inside a text stay as they are."""
    inside: set[int] = set()
    begun: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(code + "\n").readline):
        name = tokenize.tok_name[
            token.exact_type
        ]  # from Python 3.12 on, f-strings are tokens of several kinds
        if name == "FSTRING_START":
            begun.append(token.start[0])
        elif name == "FSTRING_END":
            inside.update(range(begun.pop() + 1, token.end[0] + 1))
        elif name == "STRING":
            inside.update(range(token.start[0] + 1, token.end[0] + 1))
    return "\n".join(
        line if at in inside or not line.strip() else f"    {line}"
        for at, line in enumerate(code.split("\n"), 1)
    )
