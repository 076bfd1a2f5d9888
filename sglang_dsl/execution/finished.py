"""Finished programs that ran in another process: packed there, read here like any other state.

A transcript is a linked list, which pickle would follow recursively; packed, it is a tuple of its entries,
and references into it (the begins and joins of branches) are numbers of entries.
"""

from __future__ import annotations

import copyreg
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from sglang_dsl.budgets import Budget
from sglang_dsl.concurrency.streams import Until
from sglang_dsl.conversation.requests import CallRecord
from sglang_dsl.conversation.transcript import Generation, Transcript
from sglang_dsl.errors import (
    InvalidValue,
    ProgramError,
    StateClosed,
    again,
    headline,
    stacks,
)
from sglang_dsl.interpreter.core import Checkpoint, Core, SettledCore
from sglang_dsl.interpreter.run import Variable
from sglang_dsl.ir import Gen, Node, Select, Source
from sglang_dsl.state.program_state import ProgramState
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot, VariableSnapshot


class PackedFork(msgspec.Struct, frozen=True):
    """A ForkSnapshot. `at`: the number of the parent's entries before it; these entries themselves if the
    parent was rolled back since."""

    branches: tuple[PackedState, ...]
    joined: bool
    at: int | tuple[Transcript, ...] | None


class PackedState(msgspec.Struct, frozen=True):
    """A Snapshot. `entries`: of the transcript, each without the others; `since`: the number of the
    parent's."""

    program: str
    entries: tuple[Transcript, ...]
    since: int
    error: BaseException | None
    variables: tuple[VariableSnapshot, ...]
    forks: tuple[PackedFork, ...]
    calls: tuple[CallRecord, ...]
    branch: tuple[int, ...]
    called: dict[str, int] = {}


class PackedRun(msgspec.Struct, frozen=True):
    """A program that has ended. `raws`: the text of the generated variables."""

    state: PackedState
    raws: dict[str, str | list[str]]
    ret_value: Any


def pack(state: ProgramState) -> PackedRun:
    """A state that has ended, as data for another process."""
    seen = state.core.snapshot(None)
    texts = {name: state.core.find(name).raw for name in seen.variables}
    raws = {name: raw for name, raw in texts.items() if raw is not None}
    return PackedRun(_packed(seen), raws, state.ret_value)


def unpack(run: PackedRun, index: int | None) -> ProgramState:
    """The state of a packed program, which can only be read."""
    return ProgramState(Finished(_unpacked(run.state), run.raws, run.ret_value, index))


def _pickled(state: ProgramState) -> tuple[Any, ...]:
    """A state is pickled when it has ended. Waits for that."""
    return unpack, (pack(state), state.index)


copyreg.pickle(ProgramState, _pickled)


def sendable(error: BaseException) -> BaseException:
    """`error` without its frames, which cannot be pickled; full_traceback() still shows them."""
    if isinstance(error, ProgramError):
        sent = again(error)
        assert isinstance(sent, ProgramError)
        sent.stacks = error.stacks or stacks(error)
        sent.__cause__ = None
        return sent
    return error.with_traceback(None)


def instead_of(error: BaseException, program: str) -> ProgramError:
    """The substitute of an error that cannot be pickled."""
    substitute = ProgramError(headline(error), program=program)
    substitute.stacks = stacks(error)
    return substitute


def _packed(seen: Snapshot) -> PackedState:
    entries = seen.transcript.entries()
    variables = tuple(
        one if one.error is None else msgspec.structs.replace(one, error=sendable(one.error))
        for one in seen.variables.values()
    )
    forks = tuple(
        PackedFork(
            tuple(map(_packed, fork.branches)),
            fork.joined,
            None if fork.at is None else _position(fork.at, entries),
        )
        for fork in seen.forks
    )
    error = None if seen.error is None else sendable(seen.error)
    since = len(seen.since.entries())
    return PackedState(
        seen.program,
        _alone(entries),
        since,
        error,
        variables,
        forks,
        seen.calls,
        seen.branch,
        dict(seen.called),
    )


def _alone(entries: Sequence[Transcript]) -> tuple[Transcript, ...]:
    return tuple(
        msgspec.structs.replace(entry, prev=None, before=None, turn=None, generation=_plain(entry.generation))
        for entry in entries
    )


def _plain(generation: Generation | None) -> Generation | None:
    """Without the program's own types and methods."""
    match generation:
        case Generation(node=Gen() as node):
            return Generation(dataclasses.replace(node, typed=None), generation.meta)
        case Generation(node=Select() as node):
            return Generation(dataclasses.replace(node, own=None), generation.meta)
        case _:
            return generation


def _position(at: Transcript, entries: Sequence[Transcript]) -> int | tuple[Transcript, ...]:
    before = at.entries()
    there = not before or (len(before) <= len(entries) and entries[len(before) - 1] is at)
    return len(before) if there else _alone(before)


def _unpacked(packed: PackedState) -> Snapshot:
    transcript = Transcript.EMPTY.extended(packed.entries)
    prefixes = [Transcript.EMPTY, *transcript.entries()]

    def prefix(at: int | tuple[Transcript, ...] | None) -> Transcript | None:
        match at:
            case None:
                return None
            case int():
                return prefixes[at]
            case _:
                return Transcript.EMPTY.extended(at)

    return Snapshot(
        packed.program,
        transcript,
        prefixes[packed.since],
        False,
        packed.error,
        {one.name: one for one in packed.variables},
        tuple(
            ForkSnapshot(
                tuple(map(_unpacked, fork.branches)),
                fork.joined,
                prefix(fork.at),
            )
            for fork in packed.forks
        ),
        packed.calls,
        packed.branch,
        called=packed.called,
    )


class Finished(SettledCore):
    """The core of a program that has ended in another process."""

    def __init__(
        self, seen: Snapshot, raws: Mapping[str, str | list[str]], ret_value: Any, index: int | None
    ) -> None:
        super().__init__(seen.program, seen.transcript, {}, index)
        self._seen, self.ret_value = seen, ret_value
        for name, one in seen.variables.items():
            variable = self._variables[name] = Variable(name)
            variable.raw = raws.get(name)
            if one.error is None:
                variable.settle(one.value, dict(one.meta))
            else:
                variable.fail(one.error)

    def fault(self) -> BaseException | None:
        errors = (one.error for one in self._variables.values())
        first = next((error for error in errors if isinstance(error, InvalidValue)), None)
        return None if first is None else again(first)

    def open_role(self) -> str | None:
        return self._transcript.role

    def submit(self, node: Node, src: Source | None = None) -> None:
        self._refuse()

    def fork(self, size: int, src: Source | None, budget: Budget | None = None) -> Sequence[Core]:
        self._refuse()

    async def join(self, branches: Sequence[Core], mode: str, src: Source | None, until: Until) -> None:
        self._refuse()

    async def adopt(self, branch: Core, src: Source | None, until: Until) -> None:
        self._refuse()

    def checkpoint(self) -> Checkpoint:
        self._refuse()

    def rollback(self, checkpoint: Checkpoint) -> None:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise StateClosed(f"{self.program!r} ran in another process; it can only be read")

    def snapshot(self, timeout_s: float | None = 0) -> Snapshot:
        variables = {name: variable.snapshot() for name, variable in self._variables.items()}
        return msgspec.structs.replace(self._seen, variables=variables)

    async def usage(self, until: Until) -> dict[str, int]:
        return self._seen.usage
