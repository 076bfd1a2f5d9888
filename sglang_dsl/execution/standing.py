"""States without a function: `s` of a prompt or a notebook. It streams, can be added to at any time, and can
be reset to an earlier moment, or to one of another process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Mapping
from typing import Any, cast

from sglang_dsl.concurrency.streams import blocking, run_here
from sglang_dsl.conversation.requests import Ledger
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.execution.launch import scope_of
from sglang_dsl.interpreter.core import Checkpoint
from sglang_dsl.interpreter.executor import Executor
from sglang_dsl.interpreter.parameters import Options
from sglang_dsl.interpreter.run import Mark, Prefix, RunInfo, Variable
from sglang_dsl.state.program_state import ProgramState
from sglang_dsl.tool_use.offers import NOTHING


def moment(transcript: Transcript, variables: Mapping[str, Variable], offer: Any = NOTHING) -> Checkpoint:
    """A moment with this text and these variables."""
    mark = Mark()
    mark.reach(transcript, None, 0)
    return Checkpoint(None, mark, dict(variables), transcript.role, offer)


def settled_variable(name: str, value: Any, raw: str | list[str] | None = None) -> Variable:
    """A variable with a value. `raw`: the text it was read from."""
    variable = Variable(name)
    variable.raw = raw
    variable.settle(value)
    return variable


class Standing:
    """`state` is always the same object; the executor under it is replaced. The calls of all its executors
    are counted in one ledger."""

    def __init__(self, options: Options, name: str = "session") -> None:
        self._name, self._ledger = name, Ledger()
        self._run = self._new_run(options)
        self.state = ProgramState(Executor(self._run))

    @property
    def core(self) -> Executor:
        """The current executor."""
        return cast(Executor, self.state.core)

    @property
    def ledger(self) -> Ledger:
        """The calls of the backends, in order."""
        return self._ledger

    def _new_run(self, options: Options) -> RunInfo:
        run = scope_of(options).run(self._name, None, stream=True)
        run.ledger = self._ledger
        return run

    def runs_with(self, options: Options) -> None:
        """Continue with another backend, or other defaults."""
        here = self.now()
        self._run = self._new_run(options)
        self.put(here)

    def now(self) -> Checkpoint:
        """This moment, when everything that was added is evaluated."""
        here = self.core.checkpoint()
        run_here(here.mark.reached(blocking))
        return here

    def put(self, at: Checkpoint) -> None:
        """Go to a moment: of this state, or from moment(). Running calls are stopped. Nothing may have failed
        at that moment."""
        self.core.cancel()
        executor = Executor(
            self._run,
            prefix=Prefix(at.mark, 1),
            role=at.role,
            variables=dict(at.variables),
            offer=at.offer or NOTHING,
        )
        run_here(executor.mark().reached(blocking))
        self.state._core = executor

    def rest(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait until the state and its forks are idle, for at most `timeout_s` seconds (None: no limit).
        Returns the state's error, or None; a TimeoutError if they are not idle."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        mark = self.core.mark()
        for one in (*(member.mark() for member in self._run.live()), mark):
            left = None if until is None else max(0.0, until - time.monotonic())
            run_here(one.reached(functools.partial(blocking, timeout_s=left)))
        return mark.error if mark.done else TimeoutError(f"not at rest within {timeout_s} s")

    def partial(self) -> str:
        """The text of the generation that is running, or was stopped."""
        core = self.core
        pieces = core.output.so_far()
        text = "".join(piece.text for piece in pieces)
        return text[core.so_far().length :]


def without(transcript: Transcript, since: Transcript) -> Transcript:
    """`transcript` without the open turn, if that was opened after `since`."""
    kept = transcript
    while kept.role is not None and kept is not since and kept.prev is not None:
        kept = kept.prev
    return kept


def generated(entries: Iterable[Transcript]) -> bool:
    """Whether a model generated any of it."""
    return any(entry.chosen is not None for entry in entries)
