"""Core: what a state is based on, an Executor while the program runs, a Tracer while it is compiled. Knows
neither."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_dsl.budgets import Budget
from sglang_dsl.concurrency.streams import Signal, Until
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.interpreter.run import Mark, Variable, missing
from sglang_dsl.ir import Node, Source
from sglang_dsl.views.snapshot import Snapshot


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A point of a state, returned by s.checkpoint(), for s.rollback()."""

    owner: Any
    mark: Mark
    variables: Mapping[str, Variable]
    role: str | None
    offer: Any = None


class Core(Protocol):
    """What a ProgramState is based on. Coroutines wait by `until`; snapshot() waits for at most `timeout_s`
    seconds (None: to the end)."""

    @property
    def program(self) -> str: ...
    @property
    def index(self) -> int | None:
        """The position of its item in a batch."""
        ...

    @property
    def ret_value(self) -> Any:
        """What the program's function returned; None for a fork."""
        ...

    @property
    def body_error(self) -> BaseException | None:
        """The exception of the program's function, if it runs beside the reader."""
        ...

    def fault(self) -> BaseException | None:
        """The first error of a variable set here whose text is no valid value, as far as is known by now."""
        ...

    def submit(self, node: Node, src: Source | None = None) -> None:
        """`src`: where it was added; by default the user's current line."""
        ...

    def known(self, name: str) -> bool: ...
    def names(self) -> tuple[str, ...]: ...
    @property
    def beside(self) -> bool:
        """Whether the program's function still runs, beside the caller, and may set more."""
        ...

    async def appears(self, name: str, until: Until) -> None:
        """Wait until some node sets `name`, or the function that runs beside the caller has ended."""
        ...

    def find(self, name: str) -> Variable: ...
    def set(self, name: str, value: Any) -> None: ...
    def open_role(self) -> str | None: ...
    def fork(self, size: int, src: Source | None, budget: Budget | None = None) -> Sequence[Core]: ...
    async def join(self, branches: Sequence[Core], mode: str, src: Source | None, until: Until) -> None: ...
    async def adopt(self, branch: Core, src: Source | None, until: Until) -> None: ...
    def checkpoint(self) -> Checkpoint: ...
    def rollback(self, checkpoint: Checkpoint) -> None: ...
    def watch(self, signal: Signal) -> Mark: ...
    def cancel(self) -> None: ...
    def so_far(self) -> Transcript: ...
    def snapshot(self, timeout_s: float | None = 0) -> Snapshot: ...
    async def settled(self, until: Until) -> Transcript: ...
    def pieces(self, until: Until) -> AsyncGenerator[str, None]: ...
    async def usage(self, until: Until) -> dict[str, int]: ...


class SettledCore:
    """Base of the cores without a run: every variable has its value, and nothing is waited for."""

    body_error: BaseException | None = None
    beside = False

    def __init__(
        self, program: str, transcript: Transcript, variables: dict[str, Variable], index: int | None = None
    ) -> None:
        self.program, self.index = program, index
        self.ret_value: Any = None
        self._transcript, self._variables = transcript, variables

    def known(self, name: str) -> bool:
        return name in self._variables

    def names(self) -> tuple[str, ...]:
        return tuple(self._variables)

    async def appears(self, name: str, until: Until) -> None:
        """It is set, or will never be."""

    def find(self, name: str) -> Variable:
        if (variable := self._variables.get(name)) is None:
            raise missing(name, self._variables, self.program)
        return variable

    def set(self, name: str, value: Any) -> None:
        self._variables[name] = Variable(name)
        self._variables[name].settle(value)

    def watch(self, signal: Signal) -> Mark:
        mark = Mark(signal)
        mark.reach(self._transcript, None, 0)
        return mark

    def cancel(self) -> None:
        """Nothing is running."""

    def so_far(self) -> Transcript:
        return self._transcript

    async def settled(self, until: Until) -> Transcript:
        return self._transcript

    async def pieces(self, until: Until) -> AsyncGenerator[str, None]:
        yield self._transcript.text()
