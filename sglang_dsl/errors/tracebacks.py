"""Where an error comes from and what is shown of it: the user's own lines. Where an exception leaves the
language, the frames of the language and of what it calls are removed from its traceback, and of a cause that
was raised in there one line is left; err.full_traceback() has the rest. SGLANG_DSL_FULL_TRACEBACK=1 leaves
tracebacks as they are.
"""

from __future__ import annotations

import functools
import inspect
import opcode
import os
import sys
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, NamedTuple, TypeVar, cast

from runtime.protocol import registry
from runtime.protocol.program import Source as Source

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


class Stack(NamedTuple):
    """An exception as text, and the places (file, line, function) that it passed, outermost first."""

    error: str
    places: tuple[tuple[str, int, str], ...]


class SglError(Exception):
    """Base class of the language's errors."""

    stacks: tuple[Stack, ...] = ()
    """What it came of, the first cause first, and itself: as it was before its traceback was trimmed."""
    item_index: int | None = None
    """Of an error of a batch or of map(): the position of its item, from 0."""
    item: Any = None
    """And the item."""
    shows_cause = False
    """Whether a traceback shows the error's cause; else its message says it all."""

    def full_traceback(self) -> str:
        """The error and its causes as text, with all frames, including those of the language."""
        parts = []
        *causes, own = self.stacks or stacks(self)
        shown = own.places if self.__traceback__ is None else (*_places(self), *own.places)
        notes = getattr(self, "__notes__", ())
        for stack in (*causes, Stack("\n".join([headline(self), *notes]), tuple(dict.fromkeys(shown)))):
            frames = [
                traceback.FrameSummary(file, line, name, lookup_line=False)
                for file, line, name in stack.places
            ]
            lines = traceback.StackSummary.from_list(frames).format()
            parts.append("".join(["Traceback (most recent call last):\n", *lines, stack.error, "\n"]))
        return "\nwhich led to:\n\n".join(parts)


def stacks(error: BaseException) -> tuple[Stack, ...]:
    """An exception and its causes, the first cause first. Holds no frames."""
    found: list[Stack] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:  # causes may go round in a circle
        seen.add(id(at))
        found.append(Stack(headline(at), _places(at)))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return tuple(reversed(found))


def _places(error: BaseException) -> tuple[tuple[str, int, str], ...]:
    walked = traceback.walk_tb(error.__traceback__)
    return tuple((frame.f_code.co_filename, line, frame.f_code.co_name) for frame, line in walked)


def headline(error: BaseException) -> str:
    """The exception's type and, if available, its message."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - its own __str__ fails
        return type(error).__name__


# -- the user's line -----------------------------------------------------------------------------------------


class Discarded(Source):
    """A call that is a statement: what it returns is not kept."""

    __slots__ = ()


def _is_discarded(code: CodeType, at: int) -> bool:
    """Whether the instruction behind the call at `at` drops its result."""
    following, at = code.co_code, at + 2
    while at < len(following) and following[at] == opcode.opmap["CACHE"]:
        at += 2
    return at < len(following) and following[at] == opcode.opmap["POP_TOP"]


# Programs run the same lines again and again: of each code object, by its address, the places in it that were
# asked for, by instruction; None for this package's own code. The object is kept, so that nothing else gets
# its address.
_CODES: dict[int, tuple[CodeType, dict[int, Source] | None]] = {}
_MOST_CODES = 4096


def _look(code: CodeType) -> tuple[CodeType, dict[int, Source] | None]:
    """The entry of code that is not known."""
    file = code.co_filename
    if len(_CODES) >= _MOST_CODES:
        _CODES.clear()
    made = _CODES[id(code)] = (code, None if file.startswith(_PACKAGE) and file != _DEMO else {})
    return made


def caller() -> Source | None:
    """The user's current line: the innermost frame outside this package. To be called by functions of this
    package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        known = _CODES.get(id(code))
        if known is None:
            known = _look(code)
        places = known[1]
        if places is not None:
            found = places.get(frame.f_lasti)
            if found is None:
                kind = Discarded if _is_discarded(code, frame.f_lasti) else Source
                found = kind(code.co_filename, frame.f_lineno, code.co_qualname)
                places[frame.f_lasti] = found
            return found
        frame = frame.f_back
    return None


# -- what is shown -------------------------------------------------------------------------------------------


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
            if at.__cause__ is None or (
                at is error and not (isinstance(error, SglError) and error.shows_cause)
            ):
                at.__cause__ = None
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
