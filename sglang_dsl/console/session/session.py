"""Session: `s` on a backend, and the cells that were run. A cell counts as a whole: one that raises, or whose
generation fails, leaves the state as it was; of an answer that the user stops what came of it stays.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import msgspec

import sglang_dsl
from sglang_dsl.backends.base import Backend
from sglang_dsl.console.session import cell as cells
from sglang_dsl.console.session.follow import Follower, News, View
from sglang_dsl.console.session.interrupts import answered, held, stoppable
from sglang_dsl.console.session.opening import Opening, Place, close
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
SHOWN_S = 0.3
"""A backend that is there within this time is waited for without a word."""
SETTLE_S = 5.0
"""How long the end of what was cancelled is waited for."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What was run. before: the moment to go back to; calls: its first one's place in the ledger, and the
    place behind its last one; fresh: the conversation began anew with it; said: whether it changed the state;
    stopped: whether the user stopped it; forks: what branches said in it."""

    code: str
    before: Checkpoint
    seconds: float
    calls: tuple[int, int]
    fresh: bool = False
    said: bool = True
    stopped: bool = False
    forks: tuple[ForkSnapshot, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a cell. value: of its last expression; error: why nothing of it stays; stopped: by the
    user; kept: whether what it had said stays all the same; unfit: texts that are no value of their type,
    which do."""

    value: Any = None
    error: BaseException | None = None
    stopped: bool = False
    kept: bool = True
    unfit: tuple[BaseException, ...] = ()


class Session:
    """`names`: the namespace of its cells, which is given `s` and the language's words. `words`: defaults of
    all generations (temperature, ...). `folder`: where paths of commands begin."""

    def __init__(
        self,
        opening: Opening,
        *,
        words: Mapping[str, Any] | None = None,
        names: dict[str, Any] | None = None,
        folder: Path | None = None,
    ) -> None:
        self.words = dict(words or {})
        self.names = {} if names is None else names
        self.folder = folder or Path()
        self._opening, self._opened = opening, False
        self._options = Options().updated(self.words)
        self._standing = Standing(self._options)
        self.cells: list[Cell] = []
        self._number = 0
        self._outer = global_config.default_backend
        self._programs = Stop()
        self.provide()

    def provide(self) -> None:
        """Put `s` and the language's words into the namespace; names that are there already stay."""
        self.names.setdefault("__name__", "__main__")
        for name in sglang_dsl.__all__:
            if not name.startswith("_") and name in vars(sglang_dsl):
                self.names.setdefault(name, getattr(sglang_dsl, name))
        self.names.setdefault("sgl", sglang_dsl)
        self.names[STATE] = self.state

    # -- what it is on ---------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """`s`."""
        return self._standing.state

    @property
    def standing(self) -> Standing:
        """What `s` stands on."""
        return self._standing

    @property
    def place(self) -> Place:
        """Which backend it is on, or will be."""
        return self._opening.place

    @property
    def opening(self) -> Opening:
        """The backend, or its being opened."""
        return self._opening

    @property
    def number(self) -> int:
        """Of the cell that comes next, from 1."""
        return self._number + 1

    @property
    def records(self) -> tuple[CallRecord, ...]:
        """All calls of its backends, of cells that were taken back too."""
        return self._standing.ledger.records()

    def calls_of(self, one: Cell) -> tuple[CallRecord, ...]:
        """The calls that a cell made."""
        return self.records[slice(*one.calls)]

    def ready(self, view: View | None = None) -> None:
        """Wait for the backend. Raises what opening it raised."""
        if self._opened:
            return
        backend = _backend_of(self._opening, view)
        self._options = Options(backend=backend).updated(self.words)
        self._standing.runs_with(self._options)
        # Programs that a cell defines and runs are on it, too.
        global_config.default_backend = backend
        self._opened = True

    def move(self, place: Place, view: View | None = None) -> None:
        """Go on with another backend; the one before is closed once the other is there. Raises BadProgram,
        BackendError; then nothing has changed."""
        opening = Opening(place)
        _backend_of(opening, view)
        before, was_open = self._opening, self._opened
        self._opening, self._opened = opening, False
        self.ready()
        if was_open:
            close(before.result())

    def set_words(self, words: Mapping[str, Any]) -> None:
        """Other defaults of generations; None takes one away. Raises BadProgram."""
        merged = {name: value for name, value in {**self.words, **words}.items() if value is not None}
        Options().updated(merged)
        self.words = merged
        if self._opened:
            self._options = Options(backend=self._opening.result()).updated(merged)
            self._standing.runs_with(self._options)

    def close(self) -> None:
        """Close the backend; one that is still being opened is waited for."""
        self.stop()
        global_config.default_backend = self._outer
        if not self._opened and self._opening.done and self._opening.error is not None:
            return
        close(self._opening.result())

    # -- cells -----------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Cancel what runs: `s` with its forks, and programs that cells have called. Does not wait."""
        self._standing.core.cancel()
        self._programs.interrupt()

    def run(self, code: str, view: View | None = None, *, fresh: bool = False) -> Outcome:
        """Run a cell and wait until all it asked for is done. Ctrl-C stops it. `fresh`: the conversation
        begins anew with it."""
        with held():
            return self._cell(code, view, fresh)

    def _cell(self, code: str, view: View | None, fresh: bool) -> Outcome:
        try:
            parts = cells.prepared(code, self.number)
        except (SyntaxError, ValueError, RecursionError) as error:
            return Outcome(error=error)
        try:
            self.ready(view)
        except KeyboardInterrupt:
            return Outcome(stopped=True, kept=False)
        self._number += 1
        standing, before, first = self._standing, self._standing.now(), len(self.records)
        if fresh:
            standing.put(moment(Transcript.EMPTY, {}))
        begin = standing.core.so_far()
        news = News()
        news.of(standing.core.snapshot().forks)
        known = {id(one) for one in standing.core.variables.values()}
        value: Any = None
        failure: BaseException | None = None
        stopped = untouched = False
        started = time.perf_counter()
        follower = None if view is None else Follower(standing, view)
        if follower is not None:
            follower.start()
        try:
            value, failed = stoppable(lambda: self._evaluated(parts))
            failure = None if failed is None else again(failed)
        except KeyboardInterrupt:
            stopped = True
            self.stop()
            untouched = standing.rest(SETTLE_S) is None and standing.core.so_far() is begin
            answered()
        except Exception as raised:  # noqa: BLE001 - shown to whoever wrote the cell
            failure = raised
            standing.core.cancel()
            standing.rest(SETTLE_S)
        finally:
            # After SystemExit, too: the session may be closed next.
            if follower is not None:
                follower.stop()
            self.names[STATE] = self.state
        forks = tuple(news.of(standing.core.snapshot().forks))
        if stopped:
            kept = self._kept(begin, before)
            if fresh or not untouched or self._set(known):
                standing.put(before if kept is None else kept)
            if kept is None:
                return Outcome(stopped=True, kept=False)
        elif failure is not None:
            standing.put(before)
            return Outcome(error=failure)
        calls = first, len(self.records)
        changed = fresh or bool(forks) or standing.core.so_far() is not begin or self._set(known)
        seconds = time.perf_counter() - started
        self.cells.append(Cell(code, before, seconds, calls, fresh, changed, stopped, forks))
        return Outcome(value, None, stopped, unfit=() if stopped else self._unfit(known))

    def _evaluated(self, parts: list[tuple[CodeType, bool]]) -> tuple[Any, BaseException | None]:
        """The cell's value, and what stopped `s`, once all is done. A program that was called is done when it
        has said all; one that streams is shown while it runs."""
        before = self._programs.inside()
        try:
            value = cells.run(parts, self.names)
        finally:
            self._programs.outside(before)
        states = [value] if isinstance(value, StateBase) else value if isinstance(value, Group) else ()
        for state in states:
            if isinstance(state.core, Executor) and not state.core.run.stream:
                state.core.snapshot(None)
        return value, self._standing.rest()

    def _set(self, known: set[int]) -> bool:
        return any(id(one) not in known for one in self._standing.core.variables.values())

    def _unfit(self, known: set[int]) -> tuple[BaseException, ...]:
        """Errors of variables that this cell set."""
        found = [one for one in self._standing.core.variables.values() if id(one) not in known]
        return tuple(again(one.error) for one in found if isinstance(one.error, InvalidValue))

    def _kept(self, begin: Transcript, before: Checkpoint) -> Checkpoint | None:
        """What stays of a cell that was stopped: what was said, and what came of the answer under way. None
        where no model had said anything."""
        core, partial = self._standing.core, self._standing.partial()
        said = core.so_far()
        variables = {name: one for name, one in core.variables.items() if one.error is None and one.done}
        for name, one in core.variables.items():
            if name not in variables:
                if partial and "".join(piece.text for piece in one.pieces) == partial:
                    said = said.say(partial, chosen=name)
                    variables[name], partial = settled_variable(name, partial), ""
                elif name in before.variables:
                    variables[name] = before.variables[name]
        if partial:
            said = said.say(partial, chosen="")
        if not generated(said.entries(begin)):
            return None
        if said.role is not None and before.role is None:
            said = said.close() if generated(_open_turn(said)) else without(said, begin)
        return moment(said, variables)

    def undo(self, count: int = 1) -> list[Cell]:
        """Take the last cells back that changed the state, or had branches say something; they, oldest first.
        Names that were set in Python stay. Raises BadProgram."""
        there = [one for one in self.cells if one.said]
        if not 1 <= count <= len(there):
            raise BadProgram(
                f"there are {len(there)} cells to take back, not {count}" if there else "nothing to take back"
            )
        taken = there[-count:]
        self._standing.put(taken[0].before)
        at = next(at for at, one in enumerate(self.cells) if one is taken[0])
        # What only looked at `s` since then looked at what is gone.
        since = (one for one in self.cells[at:] if not one.said and not cells.mentions(one.code, STATE))
        self.cells = [*self.cells[:at], *since]
        return taken

    def retry(self, view: View | None = None) -> Outcome:
        """Take the last cell that changed the state back and run it again; where that fails, what it had said
        before stays. Raises BadProgram."""
        after, before = self._standing.now(), list(self.cells)
        [last] = self.undo()
        made = self.run(last.code, view, fresh=last.fresh)
        if made.error is not None or not made.kept:
            self.cells = before
            self._standing.put(after)
        return made

    def adopt(self, at: Checkpoint, code: str) -> None:
        """Go to a moment that was loaded, as if this code had led there: one step for undo()."""
        here = self._standing.now()
        self._standing.put(at)
        none = (len(self.records),) * 2
        self.cells.append(Cell(code, here, 0.0, none, fresh=True))

    def whole(self) -> Snapshot:
        """The state, with all that was said and the branches of all cells, where they were forked."""
        seen = self._standing.core.snapshot()
        begin = max((at for at, one in enumerate(self.cells) if one.fresh), default=0)
        forks = [fork for one in self.cells[begin:] for fork in one.forks]
        joined = tuple(ForkSnapshot(fork.branches, True, fork.at) for fork in forks)
        return msgspec.structs.replace(seen, since=Transcript.EMPTY, forks=joined)

    def counted(self) -> list[Cell]:
        """The cells since the conversation last began anew, and of those before it what is Python alone: what
        they define may be used."""
        begin = max((at for at, one in enumerate(self.cells) if one.fresh), default=0)
        return [one for at, one in enumerate(self.cells) if at >= begin or not one.said]


def _backend_of(opening: Opening, view: View | None) -> Backend:
    """The backend, once it is open; Ctrl-C stops the waiting. Raises what opening it raised."""
    try:
        if view is not None and not stoppable(lambda: opening.wait(SHOWN_S)):
            view.waits(f"loading {opening.place} ...")
        return stoppable(opening.result)
    finally:
        if view is not None:
            view.waits(None)


def _open_turn(said: Transcript) -> list[Transcript]:
    """The entries of the turn that is open."""
    found: list[Transcript] = []
    at: Transcript | None = said
    while at is not None and at.kind not in ("open", "root"):
        found.append(at)
        at = at.prev
    return found
