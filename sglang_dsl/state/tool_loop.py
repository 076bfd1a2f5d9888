"""`with s.tool_loop() as loop`: in the block, calls of tools are run. Its parameters and its results."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sglang_dsl.conversation.requests import ToolCall, ToolStep
from sglang_dsl.errors import BadProgram
from sglang_dsl.interpreter.core import Core
from sglang_dsl.interpreter.parameters import whole
from sglang_dsl.ir import LoopBegin, LoopEnd, Source


@dataclass(eq=False)
class Steps:
    """The steps of a loop so far. `home`: the event loop of an async program, on which its coroutine
    functions run."""

    home: asyncio.AbstractEventLoop | None = None
    steps: list[ToolStep] = field(default_factory=list)


class ToolLoop:
    """An open or finished loop."""

    def __init__(self, wait: Callable[[], object], record: Steps) -> None:
        self._wait, self._record = wait, record

    @property
    def steps(self) -> list[ToolStep]:
        """The replies that called tools, in order, with the results of their calls. Waits. Also available
        after the program has failed."""
        self._wait()
        return list(self._record.steps)


class AsyncToolLoop:
    """The same in an async program."""

    def __init__(self, wait: Callable[[], Awaitable[object]], record: Steps) -> None:
        self._wait, self._record = wait, record

    async def steps(self) -> list[ToolStep]:
        """The replies that called tools, in order, with the results of their calls; see ToolLoop.steps."""
        await self._wait()
        return list(self._record.steps)


@contextmanager
def opened(core: Core, begin: LoopBegin) -> Generator[None, None, None]:
    """The block."""
    core.submit(begin, begin.src)
    try:
        yield
    finally:
        core.submit(LoopEnd(src=begin.src), begin.src)


def begun(
    max_steps: object,
    on_error: object,
    timeout: object,
    tool_choice: object,
    parallel: object,
    record: Steps,
    src: Source | None,
) -> LoopBegin:
    """The parameters of tool_loop, checked. Raises BadProgram."""
    steps = whole(max_steps)
    if steps is None or steps < 1:
        raise BadProgram(f"max_steps must be at least 1, got {max_steps!r}")
    if on_error not in ("tell", "raise"):
        raise BadProgram(f'on_error must be "tell" or "raise", got {on_error!r}')
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not 0 < timeout < math.inf:
        raise BadProgram(f"timeout must be a positive number of seconds, got {timeout!r}")
    if not isinstance(tool_choice, str) or tool_choice in ("", "none"):
        raise BadProgram(f'tool_choice must be "auto", "required" or a tool\'s name, got {tool_choice!r}')
    if not isinstance(parallel, bool):
        raise BadProgram(f"parallel takes True or False, got {parallel!r}")
    choice = tool_choice if tool_choice in ("auto", "required") else f"={tool_choice}"
    return LoopBegin(steps, str(on_error), float(timeout), choice, parallel, own=record, src=src)


def calls_of(meta: Mapping[str, Any]) -> list[ToolCall]:
    """All calls of one generation, from its metadata."""
    return [ToolCall(**call) for step in meta.get("tool_steps", ()) for call in step["calls"]]


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop of the calling code; None if a program is traced without one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
