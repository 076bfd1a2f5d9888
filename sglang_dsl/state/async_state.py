"""`s` of an async program. Writing is the same; reading is awaited.

    s += gen("x")                     async with s.fork(3) as forks: ...
    value = await s["x"]              async for piece in s.text_iter("x"): ...

Based on the same Core as the state of an ordinary program. Knows no event loop in particular.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Self, TypeVar, overload

from sglang_dsl.budgets import Budget
from sglang_dsl.choices import Choice
from sglang_dsl.concurrency.streams import awaiting
from sglang_dsl.conversation.requests import ToolCall
from sglang_dsl.errors import BadProgram, MissingVariable, WrongAttribute, of_item
from sglang_dsl.errors.tracebacks import public, trim
from sglang_dsl.interpreter.core import Core
from sglang_dsl.interpreter.joins import GATHER, join_mode
from sglang_dsl.interpreter.run import Variable
from sglang_dsl.ir import Gen, Node, Select, caller
from sglang_dsl.state.base import StateBase, checked, choice_of, name_of
from sglang_dsl.state.branches import Group, Vote
from sglang_dsl.state.program_state import ProgramState, ProgramStateGroup, Turn
from sglang_dsl.state.tool_loop import AsyncToolLoop, Steps, begun, calls_of, opened, running_loop

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741


class Pending(Awaitable[T], Generic[T]):
    """A value that is not there yet. Await it, as often as you like. Using it in any other way raises
    BadProgram with the line, because a forgotten `await` would be a silent mistake in a comparison or a
    prompt."""

    __slots__ = ("_make", "_what")

    def __init__(self, what: str, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._what, self._make = what, make

    def __await__(self) -> Generator[Any, None, T]:
        try:
            return (yield from self._make().__await__())
        except BaseException as error:
            trim(error)
            raise

    def __repr__(self) -> str:
        return f"<{self._what}, to be awaited>"

    def _message(self) -> str:
        return f"{self._what} must be awaited in an async program: await {self._what}, at {caller()}"

    def _unawaited(self, *_: object) -> NoReturn:
        raise BadProgram(self._message())

    def __hash__(self) -> int:
        # gather() and its like keep what they wait for in a dict or set.
        if str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0] != "asyncio":
            self._unawaited()
        return object.__hash__(self)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise WrongAttribute(self._message())

    __str__ = __format__ = _unawaited
    __eq__ = __ne__ = _unawaited
    __lt__ = __le__ = __gt__ = __ge__ = _unawaited
    __bool__ = __len__ = __int__ = __float__ = __index__ = _unawaited
    __contains__ = __iter__ = __getitem__ = __call__ = _unawaited
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unawaited
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __neg__ = __abs__ = __round__ = _unawaited


class Starting(Coroutine[Any, Any, "AsyncProgramState"]):
    """The result of astream(): a coroutine that is also a context manager."""

    def __init__(self, work: Coroutine[Any, Any, AsyncProgramState]) -> None:
        self._work = work
        self._state: AsyncProgramState | None = None

    def __await__(self) -> Generator[Any, Any, AsyncProgramState]:
        try:
            return (yield from self._work.__await__())
        except BaseException as error:
            trim(error)
            raise

    def send(self, value: Any, /) -> Any:
        return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()

    async def __aenter__(self) -> AsyncProgramState:
        self._state = await self._work
        return self._state

    async def __aexit__(self, *_: object) -> None:
        if self._state is not None:
            self._state.cancel()


@public
class AsyncProgramState(StateBase["AsyncTurn"]):
    """The state of a running async program. Methods that wait are coroutines; everything else is as in
    ProgramState. `blocking` is the same state for code that may block."""

    _waits = False

    def __init__(self, core: Core, sync: ProgramState | None = None) -> None:
        self._core = core
        self._sync = sync if sync is not None else ProgramState(core)

    @property
    def blocking(self) -> ProgramState:
        """The same state, with methods that block instead of being awaited."""
        return self._sync

    @property
    def ret_value(self) -> Any:
        """The return value of the program's function, once it has returned."""
        return self._sync.ret_value

    # -- writing ---------------------------------------------------------------------------------------------

    def __iadd__(self, other: object) -> Self:
        """Add text or a node. Returns at once; errors are raised where a value is read."""
        # By its type: isinstance() of an abstract class takes longer than the rest of this.
        if type(other) is Pending:
            str(other)
        if type(other) is AsyncTurn:
            other.turn.add_to(self._sync)
        elif other is not self:
            self._sync += other
        return self

    def role(self, role: str, expr: Node | str | None = None) -> AsyncTurn:
        """A turn. With `expr` it is added at once; without, use it in a `with` or an `async with`."""
        return AsyncTurn(self, self._sync.role(role, expr))

    @contextmanager
    def var_scope(self, name: str) -> Iterator[AsyncProgramState]:
        """Record the text that is added in the block as the variable `name`."""
        with self._sync.var_scope(name):
            yield self

    @contextmanager
    def tool_loop(
        self,
        max_steps: int = 8,
        *,
        on_error: str = "tell",
        timeout: float = 60.0,
        tool_choice: str = "auto",
        parallel: bool = True,
    ) -> Iterator[AsyncToolLoop]:
        """In the block, calls of tools are run; see ProgramState.tool_loop(). Tools that are coroutine
        functions run on this program's event loop."""
        steps = Steps(running_loop())
        begin = begun(max_steps, on_error, timeout, tool_choice, parallel, steps, caller())
        with opened(self._core, begin):
            yield AsyncToolLoop(self.error, steps)

    # -- reading ---------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: Gen[T]) -> Pending[T]: ...

    @overload
    def __getitem__(self, name: Select) -> Pending[str]: ...

    @overload
    def __getitem__(self, name: str) -> Pending[Any]: ...

    def __getitem__(self, name: str | Gen[Any] | Select) -> Pending[Any]:
        """The variable's value, to be awaited.

        The variable is given by its name, or by the gen or select that sets it; a type checker then knows
        the value's type. Raises ProgramError if the node failed, MissingVariable if no node sets the
        variable.
        """
        key = name if isinstance(name, str) else name_of(name)
        return Pending(f"s[{key!r}]", lambda: self._value(key))

    async def value(self, name: str, kind: TypeForm[T]) -> T:
        """s[name], checked to be of the type `kind`; see ProgramState.value()."""
        variable = await self._done(name)
        return checked(variable, variable.result(), kind)

    async def _done(self, name: str) -> Variable:
        """The variable, when it has ended."""
        if self._core.beside:
            await self._core.appears(name, awaiting)
        variable = self._core.find(name)
        await variable.wait_async(lambda: variable.done)
        return variable

    async def _value(self, name: str) -> Any:
        return (await self._done(name)).result()

    async def get_var(self, name: str) -> Any:
        """The same as await s[name]."""
        return await self._value(name)

    async def get(self, name: str, default: Any = None) -> Any:
        """The variable's value, or `default` if no node sets it."""
        try:
            return await self._value(name)
        except MissingVariable:
            return default

    async def raw(self, name: str) -> Any:
        """The variable's generated text, before it was converted to a value."""
        return (await self._done(name)).text()

    async def get_meta_info(self, name: str) -> dict[str, Any]:
        """What the backend reported about the variable's generation."""
        variable = await self._done(name)
        variable.result()
        return copy.deepcopy(variable.meta)

    async def choice(self, name: str) -> Choice:
        """The result of a select; see ProgramState.choice()."""
        return choice_of(name, await self.get_meta_info(name))

    async def tool_calls(self, name: str) -> list[ToolCall]:
        """The calls that the variable's generation made; see ProgramState.tool_calls()."""
        return calls_of(await self.get_meta_info(name))

    async def text(self) -> str:
        """The whole text. Raises ProgramError."""
        return (await self._core.settled(awaiting)).text()

    async def messages(self) -> list[dict[str, Any]]:
        """The turns as {"role", "content"}, including an open one at the end. Raises ProgramError."""
        return (await self._core.settled(awaiting)).turns()

    async def sync(self) -> None:
        """Wait until everything that was added is done. Raises ProgramError."""
        await self._core.settled(awaiting)

    async def error(self) -> BaseException | None:
        """The error of this state, or None. In a stream this includes an exception of the program's
        function."""
        return await self._error(awaiting)

    async def __aenter__(self) -> AsyncProgramState:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel everything that is still running, including the function of a stream."""
        self.cancel()

    async def usage(self) -> dict[str, int]:
        """What this run and its forks used; see ProgramState.usage()."""
        return await self._core.usage(awaiting)

    def text_iter(self, var_name: str | None = None) -> AsyncIterator[str]:
        """Pieces of one variable's text, or of the whole text, as they are generated."""
        return self.text_async_iter(var_name)

    def object_iter(self, var_name: str, *, strings: bool = True) -> AsyncIterator[Any]:
        """The variable's value while its JSON is generated; see ProgramState.object_iter()."""
        return self.object_async_iter(var_name, strings=strings)

    def __repr__(self) -> str:
        """The text so far; see ProgramState.__repr__. Does not wait."""
        return self._core.snapshot().label("AsyncProgramState")

    # -- branches --------------------------------------------------------------------------------------------

    def fork(self, size: int = 1, *, budget: Budget | None = None) -> AsyncProgramStateGroup:
        """`size` states that continue from here independently. `async with` joins them at its end, or
        cancels them if an exception leaves the block. Without it, use `await forks.join()`."""
        return AsyncProgramStateGroup(self, self._sync.fork(size, budget=budget))

    @overload
    async def map(
        self, fn: Callable[[AsyncProgramState, I], Awaitable[None]], items: Iterable[I]
    ) -> list[AsyncProgramState]: ...

    @overload
    async def map(
        self, fn: Callable[[AsyncProgramState, I], Awaitable[T]], items: Iterable[I]
    ) -> list[T]: ...

    async def map(
        self, fn: Callable[[AsyncProgramState, Any], Awaitable[Any]], items: Iterable[Any]
    ) -> list[Any]:
        """`await fn(fork, item)` for each item, in parallel, each on its own fork; see ProgramState.map()."""
        values = list(items)
        if not values:
            return []
        group = self.fork(len(values))

        async def work(index: int) -> Any:
            try:
                result = await fn(group[index], values[index])
            except BaseException as error:
                of_item(error, index, values[index], "map")
                raise
            return group[index] if result is None else result

        try:
            async with asyncio.TaskGroup() as tasks:
                begun = [tasks.create_task(work(index)) for index in range(len(values))]
        except BaseExceptionGroup as errors:
            group.cancel()
            raise errors.exceptions[0] from None
        except BaseException:
            group.cancel()
            raise
        return [task.result() for task in begun]

    async def adopt(self, branch: AsyncProgramState) -> None:
        """Continue with the text and variables of a fork; see ProgramState.adopt()."""
        await self._core.adopt(branch.core, caller(), awaiting)

    @asynccontextmanager
    async def copy(self) -> AsyncIterator[AsyncProgramState]:
        """One branch. At the end of the block its variables come back, each as a list of one."""
        async with self.fork(1) as group:
            yield group[0]


@public
class AsyncTurn:
    """Returned by s.user(...) and similar methods of an async program: a turn that was already added, or a
    context manager for `with` and `async with`."""

    def __init__(self, state: AsyncProgramState, turn: Turn) -> None:
        self._state, self.turn = state, turn

    def __str__(self) -> str:
        return str(self.turn)

    def __enter__(self) -> AsyncProgramState:
        self.turn.__enter__()
        return self._state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.turn.__exit__(kind, error, trace)

    async def __aenter__(self) -> AsyncProgramState:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


@public
class AsyncProgramStateGroup(Group[AsyncProgramState]):
    """The forks of one state, in order."""

    _waits = False

    def __init__(self, parent: AsyncProgramState, group: ProgramStateGroup) -> None:
        self._parent, self._group = parent, group
        self._states = tuple(AsyncProgramState(state.core, state) for state in group)
        self._joined = False

    def __iadd__(self, other: object) -> AsyncProgramStateGroup:
        """Add to every fork; see ProgramStateGroup."""
        self._group += other
        return self

    async def join(self, mode: str = GATHER) -> None:
        """Wait for all forks and end them; see ProgramStateGroup.join()."""
        src = caller()
        self._joined = True
        cores = [state.core for state in self._states]
        await self._parent.core.join(cores, join_mode(mode), src, awaiting)

    async def race(self, timeout: float | None = None) -> AsyncProgramState:
        """The first fork to finish everything that was added to it; see ProgramStateGroup.race()."""
        return await self.first_valid(lambda state: True, timeout)

    async def first_valid(
        self, predicate: Callable[[AsyncProgramState], Any], timeout: float | None = None
    ) -> AsyncProgramState:
        """The first fork to finish for which `predicate(fork)` is true. The predicate may be async."""
        self._joined = True
        return await self._first_valid(predicate, timeout, awaiting)

    async def best_of(
        self, score: Callable[[AsyncProgramState], Any], timeout: float | None = None
    ) -> AsyncProgramState:
        """The fork with the highest `score(fork)`. The score may be async."""
        self._joined = True
        return await self._best_of(score, timeout, awaiting)

    async def vote(
        self, name: str, key: Callable[[Any], Any] | None = None, timeout: float | None = None
    ) -> Vote:
        """The most common value of the variable `name` among the forks; see ProgramStateGroup.vote()."""
        self._joined = True
        return await self._vote(name, key, timeout, awaiting)

    async def __aenter__(self) -> AsyncProgramStateGroup:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.cancel()
        elif not self._joined:
            await self.join()
