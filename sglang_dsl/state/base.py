"""What both kinds of state have in common. A state is based on a Core; a group holds the forks of one
state. Knows neither blocking nor `await`."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NoReturn, TypeVar, overload

from sglang_dsl.concurrency.streams import Piece, Until, awaiting, value_of
from sglang_dsl.errors import BadProgram, ProgramError, WrongAddition, WrongAttribute
from sglang_dsl.errors.tracebacks import public
from sglang_dsl.interpreter.core import Checkpoint, Core
from sglang_dsl.interpreter.parameters import PARAMETERS, RUN_OPTIONS
from sglang_dsl.interpreter.run import Variable
from sglang_dsl.ir import Node
from sglang_dsl.ir.syntax import KEPT, marked
from sglang_dsl.state import branches
from sglang_dsl.state.branches import Vote
from sglang_dsl.state.partial import Reading
from sglang_dsl.views.diagrams import calls_graph
from sglang_dsl.views.notebook import Displayed, Page
from sglang_dsl.views.snapshot import Snapshot, calls_within

T = TypeVar("T", covariant=True)
_OF_A_GEN = frozenset({*PARAMETERS, "timeout"})


class _Checked:
    """Its attributes are those of its class: what is set, or read, by another name is an error that says what
    to write. Type checkers see none of it, and refuse the same."""

    _FIELDS: ClassVar[frozenset[str]] = frozenset()

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: object) -> None:
            if name not in self._FIELDS:
                raise WrongAttribute(self._cannot_set(name, value))
            object.__setattr__(self, name, value)

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise WrongAttribute(self._cannot_get(name))

        def __add__(self, other: object) -> NoReturn:
            kind = type(self).__name__
            raise WrongAddition(f"{kind} is added to in place: write s += ..., not s = s + ...")

        __radd__ = __add__

    def _cannot_set(self, name: str, value: object) -> str:
        kind = type(self).__name__
        if name in _OF_A_GEN:
            said = f"{name}={value!r:.60}"
            return (
                f"{name!r} set on {kind} would have no effect: write gen(..., {said}), or @function({said}) "
                "for all generations of a program"
            )
        if name in RUN_OPTIONS:
            return f"{name!r} set on {kind} would have no effect: pass it to program.run(..., {name}=...)"
        if hasattr(type(self), name):
            return f"{name!r} is a part of {kind} and cannot be set"
        return f"{kind} has no attribute {name!r}" + self._variable(name, " = ...")

    def _cannot_get(self, name: str) -> str:
        kind = type(self).__name__
        if name in RUN_OPTIONS:
            return f"{kind} does not keep options such as {name!r}; the metadata of a call tells what it used"
        if name in _ADDED:
            return f"{kind} has no {name!r}: write s += {name}(...)"
        if name in ("add", "append", "extend", "generate", "write"):
            return f"{kind} has no {name!r}: write s += ..."
        return f"{kind} has no attribute {name!r}" + self._variable(name, "")

    def _variable(self, name: str, end: str) -> str:
        return f"; a variable is s[{name!r}]{end}"


_ADDED = frozenset(
    {"gen", "gen_int", "gen_string", "select", "image", "video", "audio", "tools", "separate_reasoning"}
)


@public
class StateBase(_Checked, Displayed, Generic[T]):
    """Base of both kinds of state. T is the type of their turns."""

    _FIELDS = frozenset({"_core", "_sync", "_forked_from"})
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
        """Set a variable. Later reads of `name` return `value`. Raises BadProgram for a node, which has none
        yet."""
        if isinstance(value, Node) or (KEPT and isinstance(value, str) and marked(value)):
            raise BadProgram(
                f"the variable {name!r} cannot be set to a node, whose value is not known yet; "
                f"where a node is added it sets its variable: s += gen({name!r})"
            )
        self._core.set(name, value)

    def set_var(self, name: str, value: Any) -> None:
        """The same as s[name] = value."""
        self[name] = value

    def __contains__(self, name: object) -> bool:
        """Whether some node sets `name`, finished or not. Does not wait."""
        return isinstance(name, str) and self._core.known(name)

    def _ipython_key_completions_(self) -> list[str]:
        """Names that IPython completes in `s["`."""
        return list(self._core.names())

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

    @overload
    def text_async_iter(
        self, var_name: str | None = None, return_meta_data: Literal[False] = False
    ) -> AsyncIterator[str]: ...

    @overload
    def text_async_iter(
        self, var_name: str | None = None, *, return_meta_data: Literal[True]
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]: ...

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """Pieces of one variable's text, or of the whole text, as they are generated, on any event loop.

        With `return_meta_data`, yields pairs (piece, metadata): the backend's counters so far, and the
        log-probabilities of this piece's tokens. A piece of the reasoning is metadata of an empty piece,
        {"reasoning_content": ...}. get_meta_info() has what was reported after the last piece.
        """
        async with aclosing(self._pieces(var_name, awaiting, return_meta_data)) as pieces:
            async for piece in pieces:
                yield (piece.text, dict(piece.meta or {})) if return_meta_data else piece.text

    async def object_async_iter(self, var_name: str, *, strings: bool = True) -> AsyncIterator[Any]:
        """object_iter() for any event loop."""
        async with aclosing(self._objects(var_name, strings, awaiting)) as values:
            async for value in values:
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
class Group(_Checked, Displayed, Generic[S]):
    """The forks of one state, in order."""

    _FIELDS = frozenset({"_parent", "_states", "_group", "_joined"})
    _states: Sequence[S]

    def _variable(self, name: str, end: str) -> str:
        return f"; its forks have: forks[0].{name}, or the variable forks[0][{name!r}]{end}"

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
        try:
            return self._states[index]
        except TypeError as error:
            raise BadProgram(
                f"forks are numbered, got {index!r:.80}; [fork[name] for fork in forks] has a variable of "
                "each, and after forks.join() s[name] is their list"
            ) from error

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
