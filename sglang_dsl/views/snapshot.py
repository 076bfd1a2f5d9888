"""Snapshots: a program's state at one moment, for anything that displays it: terminal, notebook, repr(), a
viewer.

Plain frozen data. The holder needs no lock and sees no later change. Knows no executor and no way to
display it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from sglang_dsl.conversation.requests import CallRecord, totals
from sglang_dsl.conversation.transcript import Transcript


class VariableSnapshot(msgspec.Struct, frozen=True, eq=False):
    """One variable.

    text   what was generated so far, in a stream also while it is pending; a list with n > 1
    value  what s[name] returns, the same object, once it is done
    error  what s[name] raises, if it failed
    meta   what the backend reported
    """

    name: str
    status: Literal["pending", "done", "failed"]
    text: str | list[str] = ""
    value: Any = None
    error: BaseException | None = None
    meta: Mapping[str, Any] = {}


class ForkSnapshot(msgspec.Struct, frozen=True, eq=False):
    """The branches of one fork. `joined` True: as they were when the parent joined them, after its entry
    `at` (None: not reached yet). `joined` False: as they are now; `at` is where they were forked."""

    branches: tuple[Snapshot, ...]
    joined: bool
    at: Transcript | None = None


class Snapshot(msgspec.Struct, frozen=True, eq=False):
    """A state at one moment, returned by state.snapshot().

    transcript  the whole text; for a fork, the parent's part is before `since`
    running     whether the program still runs
    error       the first failure
    variables   by name, in the order in which they were first set
    forks       joined ones in order, then those that are still in use
    calls       the finished calls of the whole run; empty in the snapshot of a fork
    called      sums over the calls of the programs that it called, as in `usage`
    branch      () for the program itself, (2,) for its third fork, ...
    partial     in a stream, what the running generation has so far
    """

    program: str
    transcript: Transcript
    since: Transcript = Transcript.EMPTY
    running: bool = False
    error: BaseException | None = None
    variables: Mapping[str, VariableSnapshot] = {}
    forks: tuple[ForkSnapshot, ...] = ()
    calls: tuple[CallRecord, ...] = ()
    branch: tuple[int, ...] = ()
    partial: str = ""
    called: Mapping[str, int] = {}

    @property
    def text(self) -> str:
        """The whole text, with turns written as "USER: ...\\n"."""
        return self.transcript.text()

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The turns as {"role", "content"}, including an open one at the end."""
        return self.transcript.turns()

    @property
    def usage(self) -> dict[str, int]:
        """Sums over `calls`, and over those of the programs it called: calls, prompt_tokens,
        completion_tokens, cached_tokens, jumped_tokens."""
        return totals(self.calls, self.called)

    def label(self, kind: str) -> str:
        """One line for repr(): the status and the text."""
        status = "running; " if self.running else ""
        if self.error is not None:
            status = f"failed with {type(self.error).__name__}: {self.error}; "
        return f"{kind}({status}{self.text})"


def calls_within(states: Sequence[Snapshot]) -> tuple[CallRecord, ...]:
    """Of states of one run, the calls that they and their forks made, as the latest snapshot has them: each
    may have waited for its state to end."""
    places, calls = {state.branch for state in states}, max((state.calls for state in states), key=len)
    return tuple(one for one in calls if any(one.branch[: len(at)] == at for at in places))
