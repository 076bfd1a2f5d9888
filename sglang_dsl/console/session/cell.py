"""One cell of Python: compiled, run, and its errors as the user needs them."""

from __future__ import annotations

import ast
import linecache
import os
import traceback
from types import CodeType
from typing import Any

from sglang_dsl.errors import ProgramError

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep


def prepared(code: str, number: int) -> list[tuple[CodeType, bool]]:
    """The parts to run in order, each with whether its value is that of the cell. Raises SyntaxError."""
    name = f"<cell {number}>"
    tree = ast.parse(code, name)
    # Tracebacks and inspect.getsource() read the lines from here.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    parts: list[tuple[CodeType, bool]] = []
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
        parts.append((compile(ast.Expression(last.value), name, "eval"), True))
    if tree.body:
        parts.insert(0, (compile(tree, name, "exec"), False))
    return parts


def run(parts: list[tuple[CodeType, bool]], names: dict[str, Any]) -> Any:
    """The value of the last expression, or None. Raises what the code raises."""
    value = None
    for code, is_value in parts:
        if is_value:
            value = eval(code, names)  # noqa: S307 - the user's own code, typed here
        else:
            exec(code, names)  # noqa: S102 - the same
    return value


def names_in(code: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)}


def described(error: BaseException) -> tuple[str, str]:
    """An error for the user: the frames of the user's code if there are several, and the message."""
    if isinstance(error, ProgramError):
        source = f" [{error.source}]" if error.source is not None else ""
        hint = f"\n{error.hint}" if error.hint else ""
        return "", f"{type(error).__name__}: {error.message}{source}{hint}"
    message = "".join(traceback.format_exception_only(error)).rstrip()
    if isinstance(error, SyntaxError):
        return "", message
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_PACKAGE)
    ]
    if len(frames) > 1:
        return "".join(traceback.format_list(frames)).rstrip(), message
    if frames and frames[0].line:
        return f"  line {frames[0].lineno}: {frames[0].line}", message
    return "", message
