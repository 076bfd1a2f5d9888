"""One cell of Python: compiled, run, the value of its last expression, and its errors as its writer needs
them."""

from __future__ import annotations

import ast
import linecache
import os
import traceback
from types import CodeType, TracebackType
from typing import Any

from sglang_dsl.errors import ProgramError

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


def file_of(number: int) -> str:
    """What stands for a file's name in errors of this cell."""
    return f"<cell {number}>"


def prepared(code: str, number: int) -> list[tuple[CodeType, bool]]:
    """What to run, in order, and whether its value is the cell's. Raises SyntaxError."""
    name = file_of(number)
    tree = ast.parse(code, name)
    # So that tracebacks and inspect.getsource() find the lines.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    last = tree.body[-1] if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    parts: list[tuple[CodeType, bool]] = []
    if last is not None:
        tree.body.pop()
    if tree.body:
        parts.append((compile(tree, name, "exec"), False))
    if last is not None:
        parts.append((compile(ast.Expression(last.value), name, "eval"), True))
    return parts


def run(parts: list[tuple[CodeType, bool]], names: dict[str, Any]) -> Any:
    """The value of the last expression; None without one. Raises what the code raises."""
    value = None
    for code, is_value in parts:
        if is_value:
            value = eval(code, names)  # noqa: S307 - the user's own code, typed here
        else:
            exec(code, names)  # noqa: S102 - the same
    return value


def mentions(code: str, name: str) -> bool:
    """Whether the code has this name in it."""
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(ast.parse(code)))


def told(error: BaseException) -> tuple[str, str]:
    """What to show of an error: the frames that the user wrote ("" where there are none worth showing), and
    what went wrong."""
    if isinstance(error, ProgramError):
        place = f" [{error.source}]" if error.source is not None else ""
        hint = f"\n{error.hint}" if error.hint else ""
        return "", f"{type(error).__name__}: {error.message}{place}{hint}"
    if isinstance(error, SyntaxError):
        return "", "".join(traceback.format_exception_only(error)).rstrip()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not _own(frame.filename)]
    shown = (
        "".join(traceback.format_list(frames)).rstrip()
        if len(frames) > 1 or _deep(error.__traceback__)
        else ""
    )
    if not shown and frames and frames[0].line:
        shown = f"  line {frames[0].lineno}: {frames[0].line}"
    return shown, "".join(traceback.format_exception_only(error)).rstrip()


def _own(file: str) -> bool:
    return file.startswith(_HERE)


def _deep(trace: TracebackType | None) -> bool:
    return sum(not _own(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(trace)) > 1
