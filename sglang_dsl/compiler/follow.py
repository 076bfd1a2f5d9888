"""Following a program without a backend: its tree of nodes for trace(), its constant begin for cache().
Knows no executor and no scope of a run.

A program is followed once per compilation, in the caller's own context: programs of other threads and event
loops are not affected.
"""

from __future__ import annotations

import contextvars
import inspect
import random
import sys
from collections.abc import Coroutine
from typing import Any, Protocol

from sglang_dsl.compiler.trace import Placeholder, Program, Tracer
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BadProgram, ProgramError
from sglang_dsl.ir import Media, Node, RoleBegin, RoleEnd, ScopeBegin, ScopeEnd, Source, Text, Tools, flatten
from sglang_dsl.state.async_state import AsyncProgramState
from sglang_dsl.state.program_state import ProgramState

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Startable(Protocol):
    """A program that can be started or followed: SglFunction."""

    @property
    def name(self) -> str: ...
    @property
    def signature(self) -> inspect.Signature: ...
    @property
    def is_async(self) -> bool: ...
    def fill(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]: ...
    def check(self, args: Args, kwargs: Kwargs) -> None: ...
    def write(self, state: Any, args: Args, kwargs: Kwargs) -> Any: ...


CALLED: contextvars.ContextVar[list[Program] | None] = contextvars.ContextVar(
    "sglang_dsl_called", default=None
)
"""The programs called by the one that is being followed here; None if none is."""


def following() -> bool:
    """Whether this is called inside a program that is being followed."""
    return CALLED.get() is not None


def follow(program: Startable, args: Args, kwargs: Kwargs) -> tuple[ProgramState, Program]:
    """Follow a program, with placeholders for missing arguments. Raises BadProgram, ProgramError."""
    bound, missing = _bound(program, args, kwargs, Placeholder)
    tracer = Tracer(program.name)
    called: list[Program] = []
    try:
        state = _write(program, tracer, bound, called)
    except (BadProgram, ProgramError):
        raise
    except Exception as error:
        raise BadProgram(
            f"{program.name} cannot be traced without a run: {type(error).__name__}: {error}; give it "
            "arguments that it can work with, or do not branch on generated text in it"
        ) from error
    traced = Program(program.name, tracer.body(), missing, tuple(called), program)
    outer = CALLED.get()
    if outer is not None:
        outer.append(traced)
    return state, traced


def _bound(
    program: Startable, args: Args, kwargs: Kwargs, placeholder: type[Placeholder]
) -> tuple[inspect.BoundArguments, tuple[str, ...]]:
    """The arguments, and the names of those that are placeholders."""
    args, kwargs = program.fill(args, kwargs)
    bound = program.signature.bind_partial(*args, **kwargs)
    missing: list[str] = []
    for name, parameter in program.signature.parameters.items():
        ordinary = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if ordinary and name not in bound.arguments and parameter.default is parameter.empty:
            bound.arguments[name] = placeholder(name)
            missing.append(name)
    return bound, tuple(missing)


def _write(
    program: Startable, tracer: Tracer, bound: inspect.BoundArguments, called: list[Program]
) -> ProgramState:
    state = ProgramState(tracer)
    before = CALLED.set(called)
    try:
        if program.is_async:
            async_state = AsyncProgramState(tracer, state)
            tracer.ret_value = _driven(program.write(async_state, bound.args, bound.kwargs))
        else:
            tracer.ret_value = program.write(state, bound.args, bound.kwargs)
    finally:
        CALLED.reset(before)
    return state


def _driven(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of an async function that is followed without a loop: what it awaits of `s` is ready."""
    try:
        work.send(None)
    except StopIteration as done:
        return done.value
    work.close()
    raise BadProgram("it awaits something other than its state")


# -- the constant begin --------------------------------------------------------------------------------------


class _Enough(BaseException):
    """The constant begin has ended. No Exception, so that a program's `except Exception` does not catch
    it."""


# The text of an unknown argument: characters of Unicode's private use, random in each process, so that any
# part of the argument is recognized in the text.
_MARK = "".join(chr(0xE000 + at) for at in random.Random().sample(range(0x1000), 8))
_ESCAPED = tuple(f"\\u{ord(char):04x}" for char in _MARK)


class _Unknown(Placeholder):
    """An unknown argument, and its parts. Code that decides by it ends the constant begin."""

    __slots__ = ()

    def __new__(cls, name: str) -> _Unknown:
        return str.__new__(cls, _MARK)

    def __format__(self, spec: str) -> str:
        return _MARK

    def __getitem__(self, key: object) -> _Unknown:
        return self

    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name) if name.startswith("__") else self

    def __call__(self, *_: object, **__: object) -> _Unknown:
        return self

    def _enough(self, *_: object) -> Any:
        raise _Enough

    __int__ = __float__ = __bool__ = __len__ = __eq__ = __ne__ = __lt__ = __gt__ = __le__ = __ge__ = _enough
    __contains__ = __iter__ = __index__ = __hash__ = _enough


class _Leading(Tracer):
    """Collects constant text, up to the first argument, generation, choice, fork or value."""

    def __init__(self, program: str) -> None:
        super().__init__(program)
        self._handled = sys.exception()

    def submit(self, node: Node, src: Source | None = None) -> None:
        if sys.exception() is not self._handled:
            return  # the begin has ended; these are the ends of open turns
        for leaf in flatten(node):
            match leaf:
                case Text(text=text):
                    end = cut(text)
                    super().submit(Text(text[:end]), src)
                    if end < len(text):
                        raise _Enough
                case Media() | RoleBegin() | RoleEnd() | ScopeBegin() | ScopeEnd() | Tools():
                    super().submit(leaf, src)
                case _:
                    raise _Enough

    def fork(self, *_: Any, **__: Any) -> Any:
        raise _Enough


def cut(text: str) -> int:
    """Length of the text before the first unknown argument, which may be quoted."""
    ends = [at for mark in (*_MARK, *_ESCAPED) if (at := text.lower().find(mark)) >= 0]
    return min(ends, default=len(text))


def leading(program: Startable, args: Args, kwargs: Kwargs) -> Transcript:
    """The constant text of a program before its first unknown argument or generation. Its code is followed up
    to there."""
    bound, _ = _bound(program, args, kwargs, _Unknown)
    core = _Leading(program.name)
    try:
        _write(program, core, bound, [])
    except _Enough:
        pass
    except (BadProgram, ProgramError):
        raise
    except Exception:  # noqa: BLE001 - caused by the unknown argument
        pass
    return core.so_far()
