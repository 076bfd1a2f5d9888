"""Session: `s` on a backend, and the cells that were run. If a cell fails, the state is as before it; of an
answer that the user stops, the text so far stays.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from types import CodeType
from typing import Any

import msgspec

import sglang_dsl
from sglang_dsl.backends.base import Backend
from sglang_dsl.concurrency.loop import background
from sglang_dsl.console.backend_flag import BackendChoice, Opening
from sglang_dsl.console.session import cell as cells
from sglang_dsl.console.session import interrupts
from sglang_dsl.console.session.follow import Follower, View, changed_forks, fork_texts
from sglang_dsl.console.session.interrupts import stoppable
from sglang_dsl.conversation.requests import CallRecord
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BadProgram, InvalidValue, again
from sglang_dsl.execution.standing import Standing, generated, moment, settled_variable, without
from sglang_dsl.function import Options
from sglang_dsl.interpreter.core import Checkpoint
from sglang_dsl.interpreter.executor import Executor
from sglang_dsl.interpreter.run import Stop
from sglang_dsl.settings import global_config
from sglang_dsl.state.base import StateBase
from sglang_dsl.state.branches import Group
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot

STATE = "s"
QUIET_S = 0.3
"""The view is not told of a wait for the backend that is shorter than this."""
SETTLE_S = 5.0
"""How long cancelled work may take to end."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell that was run. `calls`: their range in the ledger; `fresh`: it began a new conversation;
    `changed`: it changed the state; `forks`: those with new text."""

    code: str
    before: Checkpoint
    seconds: float
    calls: tuple[int, int]
    fresh: bool = False
    changed: bool = True
    stopped: bool = False
    forks: tuple[ForkSnapshot, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a cell. `error`: the state is as before it; `kept`: whether the text of a stopped cell
    stays; `invalid`: errors of texts that are not values of their type, which stay."""

    value: Any = None
    error: BaseException | None = None
    stopped: bool = False
    kept: bool = True
    invalid: tuple[BaseException, ...] = ()


class Session:
    """`names`: the namespace of its cells, to which `s` and the language's names are added. `defaults`:
    options of all generations (temperature, ...). `folder`: where relative paths of commands begin."""

    def __init__(
        self,
        opening: Opening,
        *,
        defaults: Mapping[str, Any] | None = None,
        names: dict[str, Any] | None = None,
        folder: Path | None = None,
        words: Mapping[str, Any] | None = None,
    ) -> None:
        """words: the former name of `defaults`, for one release."""
        self.opening = opening
        self.defaults = dict(defaults or words or {})
        self.names = {} if names is None else names
        self.folder = folder or Path()
        self.cells: list[Cell] = []
        self._is_open = False
        self.standing = Standing(Options().updated(self.defaults))
        self._number = 0
        self._outer_backend = global_config.default_backend
        self._programs = Stop()
        self.names.setdefault("__name__", "__main__")
        for name in sglang_dsl.__all__:
            if not name.startswith("_") and name in vars(sglang_dsl):
                self.names.setdefault(name, getattr(sglang_dsl, name))
        self.names.setdefault("sgl", sglang_dsl)
        self.names[STATE] = self.state

    # -- its backend -----------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        return self.standing.state

    @property
    def choice(self) -> BackendChoice:
        """The choice of its backend, which may not be open yet."""
        return self.opening.choice

    @property
    def number(self) -> int:
        """The number of the next cell, from 1."""
        return self._number + 1

    @property
    def records(self) -> tuple[CallRecord, ...]:
        """All calls of the session, also those of cells that were taken back."""
        return self.standing.ledger.records()

    def calls_of(self, one: Cell) -> tuple[CallRecord, ...]:
        return self.records[slice(*one.calls)]

    def ready(self, view: View | None = None) -> None:
        """Wait until the backend is open. Raises the error of opening it, and KeyboardInterrupt."""
        if self._is_open:
            return
        backend = _wait_for(self.opening, view)
        self.standing.runs_with(Options(backend=backend).updated(self.defaults))
        global_config.default_backend = backend
        self._is_open = True

    def move(self, choice: BackendChoice, view: View | None = None) -> None:
        """Continue on another backend. If that cannot be opened, the session stays on its own."""
        opening = Opening(choice)
        _wait_for(opening, view)
        before, was_open = self.opening, self._is_open
        self.opening, self._is_open = opening, False
        self.ready()
        if was_open:
            _close(before.result())

    def set_defaults(self, changes: Mapping[str, Any]) -> None:
        """Change defaults of generations; None removes one. Raises BadProgram."""
        merged = {name: value for name, value in {**self.defaults, **changes}.items() if value is not None}
        options = Options(backend=self.opening.result() if self._is_open else None).updated(merged)
        self.defaults = merged
        if self._is_open:
            self.standing.runs_with(options)

    def close(self) -> None:
        """Stop what runs and close the backend, also one that is still being opened."""
        self.stop()
        global_config.default_backend = self._outer_backend
        if self._is_open or not self.opening.done() or self.opening.exception() is None:
            _close(self.opening.result())

    # -- cells -----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Cancel what runs: `s`, its forks, and programs that cells have called. Does not wait."""
        self.standing.core.cancel()
        self._programs.interrupt()

    @interrupts.held()
    def run(self, code: str, view: View | None = None, *, fresh: bool = False) -> Outcome:
        """Run a cell until all its generations are done. `fresh`: it begins a new conversation."""
        try:
            parts = cells.prepared(code, self.number)
        except (SyntaxError, ValueError, RecursionError) as error:
            return Outcome(error=error)
        try:
            self.ready(view)
        except KeyboardInterrupt:
            return Outcome(stopped=True, kept=False)
        self._number += 1
        standing, before, first_call = self.standing, self.standing.now(), len(self.records)
        if fresh:
            standing.put(moment(Transcript.EMPTY, {}))
        begin = standing.core.so_far()
        forks_before = fork_texts(standing.core.snapshot().forks)
        set_before = {id(one) for one in standing.core.variables.values()}
        value: Any = None
        failure: BaseException | None = None
        stopped = untouched = False
        started = time.perf_counter()
        follower = None if view is None else Follower(standing, view, forks_before)
        if follower is not None:
            follower.start()
        try:
            value, failed = stoppable(lambda: self._evaluate(parts))
            failure = None if failed is None else again(failed)
        except KeyboardInterrupt:
            stopped = True
            self.stop()
            untouched = standing.rest(SETTLE_S) is None and standing.core.so_far() is begin
            interrupts.clear()
        except Exception as raised:  # noqa: BLE001 - shown to the user, who wrote the cell
            failure = raised
            standing.core.cancel()
            standing.rest(SETTLE_S)
        finally:
            # Also after SystemExit, as the session may be closed next.
            if follower is not None:
                follower.stop()
            self.names[STATE] = self.state
        forks = tuple(changed_forks(standing.core.snapshot().forks, forks_before))
        if stopped:
            kept = self._partial_state(begin, before)
            if fresh or not untouched or self._newly_set(set_before):
                standing.put(before if kept is None else kept)
            if kept is None:
                return Outcome(stopped=True, kept=False)
        elif failure is not None:
            standing.put(before)
            return Outcome(error=failure)
        new = self._newly_set(set_before)
        changed = fresh or bool(forks) or standing.core.so_far() is not begin or bool(new)
        seconds, calls = time.perf_counter() - started, (first_call, len(self.records))
        self.cells.append(Cell(code, before, seconds, calls, fresh, changed, stopped, forks))
        errors = (one.error for one in new if isinstance(one.error, InvalidValue))
        return Outcome(value, None, stopped, invalid=() if stopped else tuple(map(again, errors)))

    def _evaluate(self, parts: list[tuple[CodeType, bool]]) -> tuple[Any, BaseException | None]:
        """The cell's value, and the error of `s`, once everything is done. A called program is waited for
        until its end, unless it streams: then it is shown while it runs."""
        token = self._programs.inside()
        try:
            value = cells.run(parts, self.names)
        finally:
            self._programs.outside(token)
        states = [value] if isinstance(value, StateBase) else value if isinstance(value, Group) else ()
        for state in states:
            if isinstance(state.core, Executor) and not state.core.run.stream:
                state.core.snapshot(None)
        return value, self.standing.rest()

    def _newly_set(self, before: set[int]) -> list[Any]:
        return [one for one in self.standing.core.variables.values() if id(one) not in before]

    def _partial_state(self, begin: Transcript, before: Checkpoint) -> Checkpoint | None:
        """The state that a stopped cell leaves; None if no model had generated anything."""
        core, partial = self.standing.core, self.standing.partial()
        transcript = core.so_far()
        variables = {name: one for name, one in core.variables.items() if one.error is None and one.done}
        for name, one in core.variables.items():
            if name not in variables:
                if partial and "".join(piece.text for piece in one.pieces) == partial:
                    transcript = transcript.say(partial, chosen=name)
                    variables[name], partial = settled_variable(name, partial), ""
                elif name in before.variables:
                    variables[name] = before.variables[name]
        if partial:
            transcript = transcript.say(partial, chosen="")
        if not generated(transcript.entries(begin)):
            return None
        if transcript.role is not None and before.role is None:
            entries = reversed([*transcript.entries()])
            keep_turn = generated(takewhile(lambda entry: entry.kind != "open", entries))
            transcript = transcript.close() if keep_turn else without(transcript, begin)
        return moment(transcript, variables)

    def undo(self, count: int = 1) -> list[Cell]:
        """Take back the last cells that changed the state or its forks; returns them, oldest first. Python
        names that they set stay. Raises BadProgram."""
        changing = [one for one in self.cells if one.changed]
        if not changing:
            raise BadProgram("nothing to take back")
        if not 1 <= count <= len(changing):
            raise BadProgram(f"there are {len(changing)} cells to take back, not {count}")
        undone = changing[-count:]
        self.standing.put(undone[0].before)
        at = next(at for at, one in enumerate(self.cells) if one is undone[0])
        # Later cells that only read `s` have read what is gone.
        since = (one for one in self.cells[at:] if not one.changed and STATE not in cells.names_in(one.code))
        self.cells = [*self.cells[:at], *since]
        return undone

    def retry(self, view: View | None = None) -> Outcome:
        """Run the last cell that changed the state again; if it fails, the earlier result stays."""
        after, before = self.standing.now(), list(self.cells)
        [last] = self.undo()
        outcome = self.run(last.code, view, fresh=last.fresh)
        if outcome.error is not None or not outcome.kept:
            self.cells = before
            self.standing.put(after)
        return outcome

    def adopt(self, at: Checkpoint, code: str) -> None:
        """Go to a loaded state, as if one cell with this code had led there."""
        here, calls = self.standing.now(), (len(self.records), len(self.records))
        self.standing.put(at)
        self.cells.append(Cell(code, here, 0.0, calls, fresh=True))

    # -- the conversation ------------------------------------------------------------------------------------

    @property
    def _begin(self) -> int:
        return max((at for at, one in enumerate(self.cells) if one.fresh), default=0)

    def whole(self) -> Snapshot:
        """The state with all of the conversation, and the forks of all its cells."""
        seen = self.standing.core.snapshot()
        forks = (fork for one in self.cells[self._begin :] for fork in one.forks)
        placed = tuple(ForkSnapshot(fork.branches, True, fork.at) for fork in forks)
        return msgspec.structs.replace(seen, since=Transcript.EMPTY, forks=placed)

    def counted(self) -> list[Cell]:
        """The cells that led to the state: those of this conversation, and earlier ones that did not change
        the state, as later cells may use their names."""
        return [one for at, one in enumerate(self.cells) if at >= self._begin or not one.changed]


def _wait_for(opening: Opening, view: View | None) -> Backend:
    """The backend, once it is open; Ctrl-C ends the wait. Raises the error of opening it."""
    try:
        if view is not None and not stoppable(lambda: wait([opening], QUIET_S)).done:
            view.wait(f"loading {opening.choice} ...")
        return stoppable(opening.result)
    finally:
        if view is not None:
            view.wait(None)


def _close(backend: Backend) -> None:
    background().run(backend.aclose())
