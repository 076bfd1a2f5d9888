"""Snapshots: a program's state at one moment, as plain frozen data for anything that displays it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from sglang_dsl.conversation.requests import CallRecord, totals
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.ir import Gen, Select


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
    """The calls of these states of one run, and of their forks. They are read from the latest snapshot, as
    each may have waited for its own state to end."""
    branches, calls = {state.branch for state in states}, max((state.calls for state in states), key=len)
    return tuple(one for one in calls if any(one.branch[: len(at)] == at for at in branches))


class Block(msgspec.Struct, frozen=True, eq=False):
    """A turn of `role`, or text outside of turns (None): its texts and media in order, never empty."""

    role: str | None
    entries: tuple[Transcript, ...]


class Branches(msgspec.Struct, frozen=True, eq=False):
    """A fork: the parts and the snapshot of each branch."""

    branches: tuple[tuple[Block | Branches, ...], ...]
    states: tuple[Snapshot, ...]


def outline(state: Snapshot) -> tuple[Block | Branches, ...]:
    """Everything after `state.since` in order, including the running generation. Joined forks are where they
    were joined, others where they were forked, or at the end if that is before `since`."""
    parts: list[Block | Branches] = []
    held: list[Transcript] = []
    role = state.since.role
    waiting: dict[int, list[ForkSnapshot]] = {}
    for fork in state.forks:
        waiting.setdefault(id(fork.at), []).append(fork)
    transcript = state.transcript.say(state.partial, chosen="") if state.partial else state.transcript

    def end_block() -> None:
        if any(entry.plain or entry.chosen is not None for entry in held):
            parts.append(Block(role, tuple(held)))
        held.clear()

    def add_forks(at: Transcript) -> None:
        if (forks := waiting.pop(id(at), None)) is not None:
            end_block()
            parts.extend(map(_branches, forks))

    add_forks(state.since)
    for entry in transcript.entries(state.since):
        if entry.kind in ("open", "close"):
            end_block()
            role = entry.role
        else:
            held.append(entry)
        add_forks(entry)
    end_block()
    parts += map(_branches, (fork for forks in waiting.values() for fork in forks))
    return tuple(parts)


def _branches(fork: ForkSnapshot) -> Branches:
    return Branches(tuple(map(outline, fork.branches)), fork.branches)


class Constraint(NamedTuple):
    """`kind`: int, regex, json_schema, a type's name, ...; `text`: the pattern, schema or options, "" if the
    kind is enough."""

    kind: str
    text: str = ""


def constraint_of(node: Gen[Any] | Select | None) -> Constraint | None:
    if node is None:
        return None
    if isinstance(node, Select):
        return Constraint("select", " | ".join(node.choices))
    kinds = ("regex", "json_schema", "ebnf", "structural_tag")
    constraint = next(
        (Constraint(one, text) for one in kinds if (text := getattr(node, one)) is not None), None
    )
    if constraint is None and node.choices is not None:
        constraint = Constraint("choices", " | ".join(node.choices))
    if node.typed is not None:
        return Constraint(node.typed.name, "" if constraint is None else constraint.text)
    if constraint is None and node.dtype is not None:
        return Constraint(node.dtype)
    return constraint
