"""Where an error comes from and what is shown of it: the user's own lines. Where an exception leaves the
language, the frames of the language and of what it calls are removed from its traceback, and of a cause that
was raised in there one line is left; err.full_traceback() has the rest. SGLANG_DSL_FULL_TRACEBACK=1 leaves
tracebacks as they are.
"""

from __future__ import annotations

import contextlib
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
_BACKENDS = os.path.join(_PACKAGE, "backends") + os.sep
_DEMO = os.path.join(_PACKAGE, "console", "demo.py")  # holds programs like a user's
# Libraries that the language calls: their frames are removed behind its own, and kept behind a user's.
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
    """Its causes, the first one first, and itself, before the traceback was trimmed."""
    item_index: int | None = None
    """The position of its item, from 0, in a batch or map()."""
    item: Any = None
    """The item."""
    shows_cause = False
    """Whether a traceback shows the error's cause; else its message says it all."""

    def full_traceback(self) -> str:
        """The error and its causes as text, with all frames, including those of the language."""
        parts = []
        *causes, itself = self.stacks or stacks(self)
        shown = itself.places if self.__traceback__ is None else (*_places(self), *itself.places)
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
    result: list[Stack] = []
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:  # causes may go round in a circle
        seen.add(id(at))
        result.append(Stack(headline(at), _places(at)))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return tuple(reversed(result))


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
    """Whether the instruction after the call at `at` drops its result."""
    following, at = code.co_code, at + 2
    while at < len(following) and following[at] == opcode.opmap["CACHE"]:
        at += 2
    return at < len(following) and following[at] == opcode.opmap["POP_TOP"]


# Programs run the same lines repeatedly: by the id of each code object its lines by instruction, None for
# this package's code. The object is kept, so that its id stays unique.
_CODES: dict[int, tuple[CodeType, dict[int, Source] | None]] = {}
_MOST_CODES = 4096


def _look(code: CodeType) -> tuple[CodeType, dict[int, Source] | None]:
    """The entry of a new code object."""
    file = code.co_filename
    if len(_CODES) >= _MOST_CODES:
        _CODES.clear()
    entry = _CODES[id(code)] = (code, None if file.startswith(_PACKAGE) and file != _DEMO else {})
    return entry


def caller() -> Source | None:
    """The user's current line: the innermost frame outside this package. For functions of this package."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        known = _CODES.get(id(code))
        if known is None:
            known = _look(code)
        places = known[1]
        if places is not None:
            source = places.get(frame.f_lasti)
            if source is None:
                kind = Discarded if _is_discarded(code, frame.f_lasti) else Source
                source = kind(code.co_filename, frame.f_lineno, code.co_qualname)
                places[frame.f_lasti] = source
            return source
        frame = frame.f_back
    return None


def user_line(error: BaseException) -> Source | None:
    """The user's line that `error` passed: the innermost frame outside this package."""
    source = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            source = Source(frame.f_code.co_filename, line, frame.f_code.co_qualname)
    return source


# -- what is shown -------------------------------------------------------------------------------------------


def trim(error: BaseException) -> None:
    """Remove the frames that are not the user's from an exception that leaves the language, and from its
    causes. To be followed by a bare `raise`, which adds no frame."""
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
            # Raised inside the language, like its own causes.
            below.__cause__ = None
            if at.__cause__ is None or (
                at is error and not (isinstance(error, SglError) and error.shows_cause)
            ):
                at.__cause__ = None
            return
        at = below


def _below(error: BaseException) -> BaseException | None:
    """The cause or context that is shown above it."""
    if error.__cause__ is not None or error.__suppress_context__:
        return error.__cause__
    return error.__context__


@functools.lru_cache(maxsize=4096)
def _is_ours(file: str) -> bool:
    return file.startswith(_OURS) and file != _DEMO


def _users(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames of the language and of libraries that it called."""
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
    trimmed: TracebackType | None = None
    for one in reversed(kept):
        trimmed = TracebackType(trimmed, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return trimmed


def public(cls: type[C]) -> type[C]:
    """Class decorator: exceptions of its public methods are trimmed."""
    for name, method in list(vars(cls).items()):
        if isinstance(method, FunctionType) and (not name.startswith("_") or name in _SPECIAL):
            setattr(cls, name, exposed(method))
    return cls


def exposed(method: F) -> F:
    """The same for one function, ordinary or async, a generator or not."""
    wrap = _called
    if inspect.isasyncgenfunction(method):
        wrap = _async_pieces
    elif inspect.isgeneratorfunction(method):
        wrap = _pieces
    elif inspect.iscoroutinefunction(method):
        wrap = _awaited
    return cast(F, functools.wraps(method)(wrap(method)))


def _called(method: Callable[..., Any]) -> Callable[..., Any]:
    def shown(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            trim(error)
            raise

    return shown


def _awaited(method: Callable[..., Any]) -> Callable[..., Any]:
    async def shown(*args: Any, **kwargs: Any) -> Any:
        try:
            return await method(*args, **kwargs)
        except BaseException as error:
            trim(error)
            raise

    return shown


def _pieces(method: Callable[..., Any]) -> Callable[..., Any]:
    def shown(*args: Any, **kwargs: Any) -> Iterator[Any]:
        try:
            yield from method(*args, **kwargs)
        except BaseException as error:
            trim(error)
            raise

    return shown


def _async_pieces(method: Callable[..., Any]) -> Callable[..., Any]:
    async def shown(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        try:
            async with aclosing(method(*args, **kwargs)) as pieces:
                async for piece in pieces:
                    yield piece
        except BaseException as error:
            trim(error)
            raise

    return shown


def forget_frames(error: BaseException) -> None:
    """Clear the language's frames in the tracebacks of an error and its causes, so that keeping the error
    does not keep the state alive. The outermost frame is running and cannot be cleared: it is removed. Frames
    of backends and of users stay: they may belong to a coroutine that goes on, which clearing would end."""
    if error.__traceback__ is not None:
        error.__traceback__ = error.__traceback__.tb_next
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:  # causes may go round in a circle
        for frame, _ in traceback.walk_tb(at.__traceback__):
            file = frame.f_code.co_filename
            if file.startswith(_PACKAGE) and not file.startswith(_BACKENDS):
                with contextlib.suppress(RuntimeError):  # it runs
                    frame.clear()
        seen.add(id(at))
        at = at.__cause__
