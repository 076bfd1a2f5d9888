"""What is shown of a failure: the user's own lines. Where an exception leaves the language, the frames of the
language and of what it calls are taken out of its traceback, and of a cause that was raised in there one line
is left; err.full_traceback() tells the rest. SGLANG_DSL_FULL_TRACEBACK=1 leaves tracebacks as they are.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from types import FunctionType, TracebackType
from typing import Any, TypeVar, cast

from runtime.protocol import registry
from sglang_dsl.errors import ProgramError, SglError, stacks

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

VARIABLE = "SGLANG_DSL_FULL_TRACEBACK"
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OURS = (_PACKAGE, os.path.dirname(os.path.dirname(os.path.abspath(registry.__file__))) + os.sep)
_DEMO = os.path.join(_PACKAGE, "console", "demo.py")  # holds programs like a user's
# What the language calls: frames of these are left out behind its own, and kept behind a user's.
_BENEATH = frozenset(
    {
        "anyio", "asyncio", "concurrent", "contextlib", "functools", "httpcore", "httpx", "importlib",
        "inspect", "json", "litellm", "msgspec", "pydantic", "re", "selectors", "socket", "ssl", "threading",
        "typing",
    }
)  # fmt: skip
_SPECIAL = frozenset({"__aenter__", "__aexit__", "__call__", "__enter__", "__exit__", "__setitem__"})


def trim(error: BaseException) -> None:
    """Of an exception that leaves the language: take out, of it and of what caused it, the frames that are
    not its reader's. To be followed by a bare `raise`, which adds no frame."""
    if not isinstance(error, Exception | KeyboardInterrupt) or os.environ.get(VARIABLE, "0") not in ("", "0"):
        return
    if isinstance(error, SglError) and not error.stacks:
        error.stacks = stacks(error)
    error.__traceback__ = _users(error.__traceback__)
    seen = {id(error)}
    at: BaseException = error
    while (below := _below(at)) is not None and id(below) not in seen:  # causes may go round in a circle
        seen.add(id(below))
        below.__traceback__ = _users(below.__traceback__)
        if below.__traceback__ is None:
            # Raised in there: neither are its own causes what a user has written.
            below.__cause__ = None
            if at.__cause__ is None or (at is error and not isinstance(error, ProgramError)):
                at.__cause__ = None  # its message says it all
            return
        at = below


def _below(error: BaseException) -> BaseException | None:
    """What is shown above it."""
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


@functools.lru_cache(maxsize=4096)
def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) and file != _DEMO


def _users(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of the language and of what it called."""
    kept: list[TracebackType] = []
    inside = False
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if _is_ours(trace.tb_frame.f_code.co_filename):
            inside = True
        elif not (inside and name.partition(".")[0] in _BENEATH):
            inside = False
            kept.append(trace)
        trace = trace.tb_next
    made: TracebackType | None = None
    for one in reversed(kept):
        made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made


def public(made: type[C]) -> type[C]:
    """A class that users hold: what its public methods raise is trimmed."""
    for name, method in list(vars(made).items()):
        if isinstance(method, FunctionType) and (not name.startswith("_") or name in _SPECIAL):
            setattr(made, name, exposed(method))
    return made


def exposed(method: F) -> F:
    """The same for one function, ordinary or async, a generator or not."""
    made = _called
    if inspect.isasyncgenfunction(method):
        made = _async_pieces
    elif inspect.isgeneratorfunction(method):
        made = _pieces
    elif inspect.iscoroutinefunction(method):
        made = _awaited
    return cast(F, functools.wraps(method)(made(method)))


def _called(method: Callable[..., Any]) -> Callable[..., Any]:
    def shown(*args: Any, **words: Any) -> Any:
        try:
            return method(*args, **words)
        except BaseException as error:
            trim(error)
            raise

    return shown


def _awaited(method: Callable[..., Any]) -> Callable[..., Any]:
    async def shown(*args: Any, **words: Any) -> Any:
        try:
            return await method(*args, **words)
        except BaseException as error:
            trim(error)
            raise

    return shown


def _pieces(method: Callable[..., Any]) -> Callable[..., Any]:
    def shown(*args: Any, **words: Any) -> Iterator[Any]:
        try:
            yield from method(*args, **words)
        except BaseException as error:
            trim(error)
            raise

    return shown


def _async_pieces(method: Callable[..., Any]) -> Callable[..., Any]:
    async def shown(*args: Any, **words: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(method(*args, **words)) as pieces:
                async for piece in pieces:
                    yield piece
        except BaseException as error:
            trim(error)
            raise

    return shown
