"""What both kinds of state have in common. A state is based on a Core; a group holds the forks of one
state. Knows neither blocking nor `await`."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Generic, TypeVar

from sglang_dsl.concurrency.streams import Piece
from sglang_dsl.concurrency.waiting import Until, value_of
from sglang_dsl.errors import BadProgram, ProgramError
from sglang_dsl.errors.tracebacks import public
from sglang_dsl.interpreter.core import Checkpoint, Core
from sglang_dsl.interpreter.variables import Variable
from sglang_dsl.ir import Node
from sglang_dsl.state import branches
from sglang_dsl.state.branches import Vote
from sglang_dsl.state.partial import Reading
from sglang_dsl.views.diagrams import calls_graph
from sglang_dsl.views.notebook import Displayed, Page
from sglang_dsl.views.snapshot import Snapshot, calls_within

T = TypeVar("T", covariant=True)


@public
class StateBase(Displayed, Generic[T]):
    """Base of both kinds of state. T is the type of their turns."""

    _core: Core

    def _page(self, timeout_s: float | None) -> Page:
        from sglang_dsl.views import html  # for notebooks alone

        seen = self._core.snapshot(timeout_s)
        return Page(html.page(seen), calls_graph(seen.program, seen.calls), seen.running)

    @property
    def core(self) -> Core:
        """The Core under this state, for tools that inspect programs."""
        return self._core

    # -- variables -------------------------------------------------------------------------------------------

    def __setitem__(self, name: str, value: Any) -> None:
        """Set a variable. Later reads of `name` return `value`."""
        self._core.set(name, value)

    def set_var(self, name: str, value: Any) -> None:
        """The same as s[name] = value."""
        self[name] = value

    def __contains__(self, name: object) -> bool:
        """Whether some node sets `name`, finished or not. Does not wait."""
        return isinstance(name, str) and self._core.known(name)

    # -- turns -----------------------------------------------------------------------------------------------

    @abstractmethod
    def role(self, role: str, expr: Node | str | None = None) -> T:
        """A turn of `role`. With `expr` it is added at once; without, use it in a `with`."""

    def system(self, expr: Node | str | None = None) -> T:
        """A system turn. With `expr` it is added at once; without, use it in a `with`."""
        return self.role("system", expr)

    def user(self, expr: Node | str | None = None) -> T:
        """A user turn. With `expr` it is added at once; without, use it in a `with`."""
        return self.role("user", expr)

    def assistant(self, expr: Node | str | None = None) -> T:
        """An assistant turn. With `expr` it is added at once; without, use it in a `with`."""
        return self.role("assistant", expr)

    def developer(self, expr: Node | str | None = None) -> T:
        """A developer turn. With `expr` it is added at once; without, use it in a `with`."""
        return self.role("developer", expr)

    def tool(self, expr: Node | str | None = None) -> T:
        """A tool turn. With `expr` it is added at once; without, use it in a `with`."""
        return self.role("tool", expr)

    # -- looking ---------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The state at this moment, as frozen data: text, variables, forks, calls, the first failure, and
        whether it still runs. Does not wait. Safe from any thread."""
        return self._core.snapshot()

    # -- waiting: written once, for callers of both kinds ----------------------------------------------------

    async def _find_later(self, name: str, until: Until) -> Variable:
        await self._core.appears(name, until)
        return self._core.find(name)

    async def _error(self, until: Until) -> BaseException | None:
        """The error of this state, or None. A text that is not a value of its type is an error until the
        variable is set again, although the state continues."""
        try:
            await self._core.settled(until)
        except ProgramError as error:
            return error
        except BaseException as error:
            if error is not self._core.body_error:
                raise
            return error
        return self._core.fault()

    async def _pieces(
        self, name: str | None, until: Until, reasoning: bool = False
    ) -> AsyncGenerator[Piece, None]:
        """Pieces of one variable's text, or of the whole text, as they are generated. `reasoning`: and of its
        reasoning, as metadata of empty pieces. Raises ProgramError if it breaks off."""
        if name is None:
            async with aclosing(self._core.pieces(until)) as texts:
                async for text in texts:
                    yield Piece(text)
            return
        variable = await self._find_later(name, until)
        # Closed here and now when a reader leaves early, not when the loop comes round to it.
        async with aclosing(variable.read(variable.ended, until)) as pieces:
            async for piece in pieces:
                if piece.text or (reasoning and piece.meta and "reasoning_content" in piece.meta):
                    yield piece
        variable.result()

    async def _objects(self, name: str, strings: bool, until: Until) -> AsyncGenerator[Any, None]:
        """A variable's value while its JSON is generated."""
        variable = await self._find_later(name, until)
        reading = Reading(variable, strings)
        async with aclosing(variable.read(variable.ended, until)) as pieces:
            async for piece in pieces:
                for value in reading.take(piece.text):
                    yield value
        for value in reading.end():
            yield value

    # -- going back, stopping --------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """This point of the program, for rollback(). Does not wait."""
        return self._core.checkpoint()

    def rollback(self, checkpoint: Checkpoint) -> None:
        """Return to an earlier point of this state. Text, variables and errors since then are forgotten.

        Calls that are still running are no longer waited for by readers, but they finish before the next
        ones begin; call cancel() first to stop them. Raises BadProgram for another state's checkpoint, and
        in a stream, which cannot be taken back.
        """
        self._core.rollback(checkpoint)

    def cancel(self) -> None:
        """Stop everything that is running, including the branches. Readers get ProgramCancelled."""
        self._core.cancel()


S = TypeVar("S", bound=StateBase[Any])


@public
class Group(Displayed, Generic[S]):
    """The forks of one state, in order."""

    _states: Sequence[S]

    def _page(self, timeout_s: float | None) -> Page:
        from sglang_dsl.views import html  # for notebooks alone

        until = None if timeout_s is None else time.monotonic() + timeout_s
        seen = []
        for state in self._states:
            left = None if until is None else max(0.0, until - time.monotonic())
            seen.append(state.core.snapshot(left))
        program, calls = seen[0].program, calls_within(seen)
        running = any(one.running for one in seen)
        return Page(html.group(seen), calls_graph(program, calls), running)

    def __repr__(self) -> str:
        running = sum(state.core.snapshot().running for state in self._states)
        forks = f"{len(self._states)} fork{'' if len(self._states) == 1 else 's'}"
        return f"{type(self).__name__}({forks}{f', {running} running' if running else ''})"

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> S:
        return self._states[index]

    def __setitem__(self, index: int, state: S) -> None:
        # `forks[i] += x` ends with this assignment.
        if self._states[index] is not state:
            raise BadProgram("a fork cannot be replaced; use forks[i] += ... to add to it")

    def __iter__(self) -> Iterator[S]:
        return iter(self._states)

    async def _first_valid(self, predicate: Callable[[S], Any], timeout: float | None, until: Until) -> S:
        race = branches.Race(self._states)
        try:
            async with aclosing(branches.as_they_end(self._states, timeout, until)) as ends:
                async for ended in ends:
                    good = ended.error is None and bool(await value_of(predicate(ended.branch)))
                    if race.take(ended, good):
                        break
        except BaseException:
            self.cancel()
            raise
        return race.result()

    async def _best_of(self, score: Callable[[S], Any], timeout: float | None, until: Until) -> S:
        best = branches.Best(self._states)
        try:
            async for ended in branches.as_they_end(self._states, timeout, until):
                value = await value_of(score(ended.branch)) if ended.error is None else 0.0
                best.take(ended, float(value))
        except BaseException:
            self.cancel()
            raise
        return best.result()

    async def _vote(
        self, name: str, key: Callable[[Any], Any] | None, timeout: float | None, until: Until
    ) -> Vote:
        found: dict[int, Any] = {}
        try:
            async for ended in branches.as_they_end(self._states, timeout, until):
                if ended.error is None:
                    variable = await ended.branch._find_later(name, until)
                    await until(variable, lambda v=variable: v.done)  # type: ignore[misc]
                    value = variable.result()
                    found[ended.index] = value if key is None else key(value)
        except BaseException:
            self.cancel()
            raise
        values, failed = [found[index] for index in sorted(found)], len(self._states) - len(found)
        return branches.count_votes(values, failed, branches.place_of(self._states))

    def cancel(self) -> None:
        """Stop all forks."""
        for state in self._states:
            state.cancel()
