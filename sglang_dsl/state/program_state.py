"""`s`, the state a program writes to and reads from, and groups of its forks.

`+=` only queues; reading waits. Stands on a Core: an Executor while the program runs, a Tracer while it is
compiled. Knows neither.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from sglang_dsl.budgets import Budget
from sglang_dsl.choices import Choice
from sglang_dsl.concurrency.loop import in_thread
from sglang_dsl.concurrency.waiting import awaiting, blocking, iterate_here, run_here
from sglang_dsl.conversation.tool_calls import ToolCall
from sglang_dsl.errors import BadProgram, MissingVariable
from sglang_dsl.errors.tracebacks import public, trim
from sglang_dsl.interpreter.core import Core
from sglang_dsl.interpreter.joins import GATHER, join_mode
from sglang_dsl.interpreter.lower import no_nodes
from sglang_dsl.interpreter.variables import Variable
from sglang_dsl.ir import (
    Gen,
    Node,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    Seq,
    as_node,
    caller,
    concat,
)
from sglang_dsl.state import branches
from sglang_dsl.state.base import Group, StateBase
from sglang_dsl.state.branches import Vote
from sglang_dsl.state.executor_view import ExecutorView
from sglang_dsl.state.reads import checked, choice_of, name_of
from sglang_dsl.state.tool_loop import Steps, ToolLoop, begun, calls_of, opened
from sglang_dsl.views.notebook import REPR_WAIT_S

T = TypeVar("T")


@public
class ProgramState(StateBase["Turn"]):
    """The running program. Use it from one thread at a time; reading, which waits by blocking, is safe from
    any."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # What the user's function returned, once it has.
        self.ret_value: Any = None
        # In a batch, the place of its item.
        self.index: int | None = None
        # Of a fork: the state of a stream is there as long as somebody can read what comes of it.
        self._forked_from: ProgramState | None = None

    @property
    def stream_executor(self) -> ExecutorView:
        """The state under the names that sglang's programs read from its executor."""
        return ExecutorView(self)

    def __iadd__(self, other: object) -> Self:
        """Add text or a node. Returns at once; what goes wrong is raised where its value is read."""
        try:
            if type(other) is Seq:
                self._core.submit(other)
            elif isinstance(other, Turn):
                other.add_to(self)
            elif other is not self:
                src = caller()
                self._core.submit(as_node(other, src), src)
        except BaseException as error:
            trim(error)
            raise
        return self

    # -- variables -------------------------------------------------------------------------------------------

    @overload
    def __getitem__(self, name: Gen[T]) -> T: ...

    @overload
    def __getitem__(self, name: Select) -> str: ...

    @overload
    def __getitem__(self, name: str) -> Any: ...

    def __getitem__(self, name: str | Gen[Any] | Select) -> Any:
        """The variable's value; waits for the last queued node that sets it. By its name, or by the gen or
        select that sets it: a type checker then knows what it is. Raises ProgramError where that failed,
        MissingVariable where no node sets it."""
        try:
            return self._done(name if isinstance(name, str) else name_of(name)).result()
        except BaseException as error:
            trim(error)
            raise

    def value(self, name: str, kind: type[T]) -> T:
        """s[name], which must be of the type `kind`, as a type checker then knows. Raises InvalidValue where
        it is not, and as s[name] does."""
        variable = self._done(name)
        return checked(variable, variable.result(), kind)

    def _done(self, name: str) -> Variable:
        """The variable, when it has ended."""
        # No coroutine where none is needed: this is what programs do most.
        if self._core.beside:
            run_here(self._core.appears(name, blocking))
        variable = self._core.find(name)
        variable.wait(lambda: variable.done)
        return variable

    def get_var(self, name: str) -> Any:
        """s[name]."""
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The variable's value, or `default` where no node sets it."""
        try:
            return self[name]
        except MissingVariable:
            return default

    def raw(self, name: str) -> Any:
        """The variable's text as it was generated (a list of them with n > 1), where s[name] is a value read
        from it; waits. Raises ProgramError where nothing was generated."""
        return self._done(name).text()

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """What the backend said about the variable's generation: token counts, finish reason, ...; waits."""
        variable = self._done(name)
        variable.result()
        return copy.deepcopy(variable.meta)

    def choice(self, name: str) -> Choice:
        """What a select decided: text, index, log-probabilities and probabilities of all options; waits.
        Raises BadProgram where `name` was not selected."""
        return choice_of(name, self.get_meta_info(name))

    def __enter__(self) -> ProgramState:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody needs it any more: what is under way, the function of a stream included, is cancelled."""
        self.cancel()

    async def __aenter__(self) -> ProgramState:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    # -- the whole -------------------------------------------------------------------------------------------

    def text(self) -> str:
        """All that was said, turns written as "USER: ...\\n"; waits. Raises ProgramError."""
        return run_here(self._core.settled(blocking)).text()

    def messages(self) -> list[dict[str, Any]]:
        """The turns as {"role", "content"}, the open one last; waits. Content is verbatim. Raises
        ProgramError."""
        return run_here(self._core.settled(blocking)).turns()

    def sync(self) -> None:
        """Wait until all that was added is done. Raises ProgramError."""
        run_here(self._core.settled(blocking))

    def error(self) -> BaseException | None:
        """What went wrong, or None; waits. In a stream, also what the program's function raised. A variable
        whose text is no value of its type counts until it is set anew, though the state goes on."""
        return run_here(self._error(blocking))

    def usage(self) -> dict[str, int]:
        """Tokens of this run with all its forks: calls, prompt_tokens, completion_tokens, cached_tokens,
        jumped_tokens; waits."""
        return run_here(self._core.usage(blocking))

    def show(self, form: str = "tree") -> None:
        """Print the state to the terminal: turns, generated text, forks, usage; or its calls as a diagram,
        form="mermaid" or "dot"."""
        from sglang_dsl.views import terminal  # rich takes long to import

        terminal.check_form(form)
        terminal.show(self._core.snapshot(None), form=form)

    def __repr__(self) -> str:
        """With the text, what went wrong where something did, and whether it still runs; waits a moment for
        its end, and no longer."""
        return self._core.snapshot(REPR_WAIT_S).label("ProgramState")

    def __str__(self) -> str:
        """The same, waiting for the end."""
        return self._core.snapshot(None).label("ProgramState")

    # -- streaming -------------------------------------------------------------------------------------------

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Pieces as they come, of one variable or of the whole text (the prompt included). One piece where
        the program was not run with stream=True. Raises ProgramError where the text breaks off."""
        for piece in iterate_here(self._pieces(var_name, blocking)):
            yield piece.text

    async def text_async_iter(
        self, var_name: str | None = None, return_meta_data: bool = False
    ) -> AsyncIterator[Any]:
        """The same for any event loop. `return_meta_data`: pairs (piece, what the backend said with it: its
        counters so far, the log-probabilities of this piece's tokens). What is said after the last text,
        get_meta_info() tells."""
        async with aclosing(self._pieces(var_name, awaiting)) as pieces:
            async for piece in pieces:
                yield (piece.text, dict(piece.meta or {})) if return_meta_data else piece.text

    def object_iter(self, var_name: str, *, strings: bool = True) -> Iterator[Any]:
        """The variable's value while its JSON is written: what is known so far, each time there is more, and
        last the whole.

        Each is plain data, or, where the generation has a type, a value of it that was not validated, with
        None for what was not written yet; the last one is s[var_name], or the whole data. Nothing shown is
        taken back: numbers and words appear when they have ended, strings grow. `strings=False`: they appear
        when they have ended, too. Data of different moments share their finished parts: do not change them.
        Text that is not JSON (a number, an option of an Enum) is shown when it has ended. Raises ProgramError
        where the text breaks off.
        """
        yield from iterate_here(self._objects(var_name, strings, blocking))

    async def object_async_iter(self, var_name: str, *, strings: bool = True) -> AsyncIterator[Any]:
        """The same for any event loop."""
        async with aclosing(self._objects(var_name, strings, awaiting)) as values:
            async for value in values:
                yield value

    # -- turns -----------------------------------------------------------------------------------------------

    def role(self, role: str, expr: Node | str | None = None) -> Turn:
        """A turn: added at once with `expr`; without, use it in a `with`."""
        no_nodes("a role's name", role)
        turn = Turn(self, role)
        if expr is not None:
            src = caller()
            self._core.submit(
                concat(RoleBegin(role, src=src), as_node(expr, src), RoleEnd(role, src=src)), src
            )
            turn.added = True
        return turn

    @contextmanager
    def var_scope(self, name: str) -> Iterator[ProgramState]:
        """Record the text added inside into the variable `name`."""
        no_nodes("a variable's name", name)
        src = caller()
        self._core.submit(ScopeBegin(name, src=src), src)
        try:
            yield self
        finally:
            self._core.submit(ScopeEnd(name, src=src), src)

    # -- tools -----------------------------------------------------------------------------------------------

    @contextmanager
    def tool_loop(
        self,
        max_steps: int = 8,
        *,
        on_error: str = "tell",
        timeout: float = 60.0,
        tool_choice: str = "auto",
        parallel: bool = True,
    ) -> Iterator[ToolLoop]:
        """In the block a generation may call the tools that were offered (s += tools([...])): its calls are
        run, side by side, what they give goes back to the model in turns of the tool, and so on until it
        answers without a call. That answer is the generation's text.

        max_steps    replies with calls, at most; when it calls on, the generation fails with ToolLoopLimit
        on_error     what a tool raises: "tell" the model as text, or "raise" it as ToolError
        timeout      seconds of each call
        tool_choice  of the first reply: "auto", "required", or the name of the tool it must call
        parallel     whether one reply may have several calls

        An unknown tool and wrong arguments are always told to the model. Calls of tools that nothing runs end
        the generation, and none of that reply is run: tool_calls() tells them, and turns of the tool that the
        program adds answer them in order. In streams each reply and each result is one piece.
        """
        told = Steps()
        begin = begun(max_steps, on_error, timeout, tool_choice, parallel, told, caller())
        with opened(self._core, begin):
            yield ToolLoop(self, told)

    def tool_calls(self, name: str) -> list[ToolCall]:
        """The calls that the variable's generation made, with what came of them, in order; waits."""
        return calls_of(self.get_meta_info(name))

    # -- branches --------------------------------------------------------------------------------------------

    def fork(
        self,
        size: int = 1,
        position_ids_offset: Sequence[int] | None = None,
        *,
        budget: Budget | None = None,
    ) -> ProgramStateGroup:
        """`size` states that go on from here, each on its own. They share this text and its variables.
        `budget`: what each of them may use. `position_ids_offset`: one number per branch, as programs for
        sglang give them; without effect, there as here: positions follow from the text."""
        if type(size) is not int or size < 1:
            raise BadProgram(f"fork takes a number of branches, at least 1; got {size!r}")
        if position_ids_offset is not None and len(position_ids_offset) != size:
            raise BadProgram(f"{len(position_ids_offset)} offsets for {size} forks; give one for each")
        src = caller()
        forks = [ProgramState(core) for core in self._core.fork(size, src, budget)]
        for fork in forks:
            fork._forked_from = self
        return ProgramStateGroup(self, forks)

    def map(self, fn: Callable[[ProgramState, Any], Any], items: Iterable[Any]) -> list[Any]:
        """Call `fn(fork, item)` for each item, each on a fork of its own, side by side on a bounded number of
        threads. Gives what the calls return, in order; a call that returns None stands for its fork. Raises
        the first call's error, in order; the forks are cancelled then."""
        given = list(items)
        if not given:
            return []
        group = self.fork(len(given))

        def work(index: int) -> Any:
            made = fn(group[index], given[index])
            return group[index] if made is None else made

        try:
            return branches.in_threads(
                [functools.partial(work, index) for index in range(len(given))], in_thread
            )
        except BaseException:
            group.cancel()
            raise

    def adopt(self, branch: ProgramState) -> None:
        """Go on with what a fork said and set, as if it had been said here; waits for it. Raises its
        ProgramError."""
        run_here(self._core.adopt(branch.core, caller(), blocking))

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[ProgramState]:
        """One branch; at the end of the block its variables come back, each as a list of one."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        except BaseException:
            group[0].cancel()
            raise
        group.join()


@public
class Turn:
    """What s.user(...) gives: a turn already added, or the context manager that opens and closes one."""

    def __init__(self, state: ProgramState, role: str) -> None:
        self._state, self._role = state, role
        self.added = False

    def __str__(self) -> str:
        # In a text this would be a silent mistake.
        word = f"s.{self._role}(...)"
        raise BadProgram(f"{word} adds its turn by itself and is no text, at {caller()}; leave the s. out")

    def add_to(self, state: ProgramState) -> None:
        """`s += s.user(...)`: what was added stays added once; an unused turn is added empty."""
        if state is not self._state:
            raise BadProgram("this turn belongs to another state; use the word without a state: user(...)")
        if not self.added:
            src = caller()
            state.core.submit(concat(RoleBegin(self._role, src=src), RoleEnd(self._role, src=src)), src)
            self.added = True

    def __enter__(self) -> ProgramState:
        if self.added:
            raise BadProgram(
                f"this turn of {self._role!r} was added already; leave its text out to use it in a with"
            )
        self.added = True
        src = caller()
        self._state.core.submit(RoleBegin(self._role, src=src), src)
        return self._state

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an exception whatever is open is closed, so that nothing hides that exception.
        role = self._role if error is None else self._state.core.open_role()
        if role is not None:
            src = caller()
            self._state.core.submit(RoleEnd(role, src=src), src)


@public
class ProgramStateGroup(Group[ProgramState]):
    """Forks of one state, in order."""

    def __init__(self, parent: ProgramState, states: Sequence[ProgramState]) -> None:
        self._parent = parent
        self._states = tuple(states)

    def __iadd__(self, other: object) -> ProgramStateGroup:
        """Add to every fork: text or a node to each, a list one by one, a function of the index what it
        returns."""
        src = caller()
        for state, node in zip(self._states, self._shares(other), strict=True):
            state.core.submit(as_node(node, src), src)
        return self

    def _shares(self, other: object) -> Sequence[object]:
        size = len(self._states)
        match other:
            case str() | Node():
                return [other] * size
            case list() | tuple():
                if len(other) != size:
                    raise BadProgram(f"{len(other)} additions for {size} forks; give one for each")
                return other
            case Callable():
                return [other(index) for index in range(size)]
            case _:
                raise TypeError(
                    "forks take text, a node, a list of these or a function of the index; "
                    f"got {type(other).__name__}"
                )

    def join(self, mode: str = GATHER) -> None:
        """Wait for all forks and end them. Raises the first fork's ProgramError, in order. What the parent
        takes over:

        "gather_variable"     each variable that forks set becomes the list of their values, in order
        "concate_and_append"  what they said is added to the parent's text, in order
        "dict"                each variable becomes {fork's number: value}
        "overwrite"           each variable becomes the last fork's value
        "error"               each variable becomes its value; one that two forks set, or that the parent had
                              before, is a BadProgram
        """
        src = caller()
        cores = [state.core for state in self._states]
        run_here(self._parent.core.join(cores, join_mode(mode), src, blocking))

    # -- choosing --------------------------------------------------------------------------------------------

    def race(self, timeout: float | None = None) -> ProgramState:
        """The fork that first has done all that was added to it; the others are cancelled. Raises Timeout
        (all are cancelled), the first fork's error where all failed."""
        return self.first_valid(lambda state: True, timeout)

    def first_valid(
        self, predicate: Callable[[ProgramState], object], timeout: float | None = None
    ) -> ProgramState:
        """The first fork to end for which `predicate(fork)` is true; the others are cancelled. Raises
        NoWinner where there is none, Timeout (seconds), what the predicate raises."""
        return run_here(self._first_valid(predicate, timeout, blocking))

    def best_of(self, score: Callable[[ProgramState], float], timeout: float | None = None) -> ProgramState:
        """The fork for which `score(fork)` is highest, the earliest on a tie; forks that failed, or whose
        score is NaN, are passed over. Raises as first_valid does."""
        return run_here(self._best_of(score, timeout, blocking))

    def vote(self, name: str, key: Callable[[Any], Any] | None = None, timeout: float | None = None) -> Vote:
        """What most forks have in the variable `name`; `key` says what of a value is compared. Forks that
        failed do not vote. Raises NoWinner, Timeout."""
        return run_here(self._vote(name, key, timeout, blocking))
