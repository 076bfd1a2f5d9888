"""`s`, the state that a program writes to and reads from, and groups of its forks.

`+=` only queues; reading waits. A state is based on a Core: an Executor while the program runs, a Tracer
while it is traced. This module knows neither.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

from sglang_dsl.budgets import Budget
from sglang_dsl.choices import Choice
from sglang_dsl.concurrency.loop import in_thread
from sglang_dsl.concurrency.streams import blocking, iterate_here, run_here
from sglang_dsl.conversation.requests import ToolCall
from sglang_dsl.errors import BadProgram, MissingVariable, of_item
from sglang_dsl.errors.tracebacks import public, trim
from sglang_dsl.interpreter.core import Core
from sglang_dsl.interpreter.joins import GATHER, join_mode
from sglang_dsl.interpreter.parameters import no_nodes
from sglang_dsl.interpreter.run import Variable
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
from sglang_dsl.state.base import StateBase, checked, choice_of, name_of
from sglang_dsl.state.branches import Group, Vote, in_threads
from sglang_dsl.state.executor_view import ExecutorView
from sglang_dsl.state.tool_loop import Steps, ToolLoop, begun, calls_of, opened
from sglang_dsl.views.notebook import REPR_WAIT_S

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741


@public
class ProgramState(StateBase["Turn"]):
    """The state of a running program: text and turns are added with `+=`, variables are read with
    s["name"].

    Use it from one thread at a time. Reading blocks until the value is there, and is safe from any thread.
    """

    _forked_from: ProgramState | None = None
    """Of a fork: keeps the state of a stream alive while a fork can be read."""

    def __init__(self, core: Core) -> None:
        vars(self)["_core"] = core  # a known name: not checked

    @property
    def ret_value(self) -> Any:
        """The return value of the program's function, once it has returned."""
        return self._core.ret_value

    @property
    def index(self) -> int | None:
        """In a batch, the position of its item."""
        return self._core.index

    @property
    def stream_executor(self) -> ExecutorView:
        """The state under the names that programs written for sglang read from its executor."""
        return ExecutorView(self)

    def __iadd__(self, other: object) -> Self:
        """Add text or a node. Returns at once; errors are raised where a value is read."""
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
        """The variable's value. Waits for the last queued node that sets it.

        The variable is given by its name, or by the gen or select that sets it; a type checker then knows
        the value's type. Raises ProgramError if the node failed, MissingVariable if no node sets the
        variable.
        """
        try:
            return self._done(name if isinstance(name, str) else name_of(name)).result()
        except BaseException as error:
            trim(error)
            raise

    def value(self, name: str, kind: TypeForm[T]) -> T:
        """s[name], checked to be of the type `kind`, which type checkers then know. Raises InvalidValue if
        it is not, and otherwise the same errors as s[name]."""
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
        """The same as s[name]."""
        return self[name]

    def get(self, name: str, default: Any = None) -> Any:
        """The variable's value, or `default` if no node sets it."""
        try:
            return self[name]
        except MissingVariable:
            return default

    def raw(self, name: str) -> Any:
        """The variable's generated text (a list of texts with n > 1), before it was converted to a value.
        Waits. Raises ProgramError if nothing was generated."""
        return self._done(name).text()

    def get_meta_info(self, name: str) -> dict[str, Any]:
        """What the backend reported about the variable's generation: token counts, finish reason, ...
        Waits."""
        variable = self._done(name)
        variable.result()
        return copy.deepcopy(variable.meta)

    def choice(self, name: str) -> Choice:
        """The result of a select: text, index, log-probabilities and probabilities of all options. Waits.
        Raises BadProgram if `name` was not set by a select."""
        return choice_of(name, self.get_meta_info(name))

    def __enter__(self) -> ProgramState:
        return self

    def __exit__(self, *_: object) -> None:
        """Cancel everything that is still running, including the function of a stream."""
        self.cancel()

    async def __aenter__(self) -> ProgramState:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    # -- the whole -------------------------------------------------------------------------------------------

    def text(self) -> str:
        """The whole text, with turns written as "USER: ...\\n". Waits. Raises ProgramError."""
        return run_here(self._core.settled(blocking)).text()

    def messages(self) -> list[dict[str, Any]]:
        """The turns as {"role", "content"}, including an open one at the end. Content is unchanged. Waits.
        Raises ProgramError."""
        return run_here(self._core.settled(blocking)).turns()

    def sync(self) -> None:
        """Wait until everything that was added is done. Raises ProgramError."""
        run_here(self._core.settled(blocking))

    def error(self) -> BaseException | None:
        """The error of this state, or None. Waits. In a stream this includes an exception of the program's
        function. A text that is not a value of its type is an error until the variable is set again,
        although the state continues."""
        return run_here(self._error(blocking))

    def usage(self) -> dict[str, int]:
        """What this run used, with its forks and the programs it called: calls, prompt_tokens,
        completion_tokens, cached_tokens, jumped_tokens. Waits."""
        return run_here(self._core.usage(blocking))

    def show(self, form: str = "tree") -> None:
        """Print the state to the terminal: turns, generated text, forks, usage. With form="mermaid" or
        "dot", print its calls as a diagram."""
        from sglang_dsl.views import terminal  # rich takes long to import

        terminal.check_form(form)
        terminal.show(self._core.snapshot(None), form=form)

    def __repr__(self) -> str:
        """The text, the error if there is one, and whether the program still runs. Waits a moment for its
        end, and no longer."""
        return self._core.snapshot(REPR_WAIT_S).label("ProgramState")

    def __str__(self) -> str:
        """The same as repr(), but waits for the end."""
        return self._core.snapshot(None).label("ProgramState")

    # -- streaming -------------------------------------------------------------------------------------------

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Pieces of one variable's text, or of the whole text (including the prompt), as they are
        generated. Without stream=True it is one piece. Raises ProgramError if the text breaks off."""
        for piece in iterate_here(self._pieces(var_name, blocking)):
            yield piece.text

    def object_iter(self, var_name: str, *, strings: bool = True) -> Iterator[Any]:
        """The variable's value while its JSON is generated: what is known so far, each time there is more.
        The last item is the complete value.

        If the generation has a type, each item is an instance of it; its fields are of their types, or None
        for what is not there yet. The last item is s[var_name]. Otherwise the items are plain data.

        Nothing is taken back. Strings grow where the type is str, unless `strings` is False; other values (a
        number, an option, a date) appear when they are complete, a union as soon as only one of its types is
        left, text that is not JSON at its end. Items share their finished parts, so do not change them.
        Raises ProgramError if the text breaks off.
        """
        yield from iterate_here(self._objects(var_name, strings, blocking))

    # -- turns -----------------------------------------------------------------------------------------------

    def role(self, role: str, expr: Node | str | None = None) -> Turn:
        """A turn. With `expr` it is added at once; without, use it in a `with`."""
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
        """Record the text that is added in the block as the variable `name`."""
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
        """In the block, generations may call the tools that were offered with s += tools([...]).

        The calls are run in parallel, and their results go back to the model in tool turns. This repeats
        until the model answers without a call. That answer is the generation's text.

        max_steps    how many replies may call tools; after that the generation fails with ToolLoopLimit
        on_error     when a tool raises: "tell" the model as text, or "raise" a ToolError
        timeout      seconds that each call may take
        tool_choice  for the first reply: "auto", "required", or the name of the tool it must call
        parallel     whether one reply may contain several calls

        An unknown tool and wrong arguments are always reported to the model as text. A call of a tool that
        nothing runs ends the generation, and no call of that reply is run: tool_calls() returns them, and
        the program answers them with tool turns, in order. In streams, each reply and each result is one
        piece.
        """
        steps = Steps()
        begin = begun(max_steps, on_error, timeout, tool_choice, parallel, steps, caller())
        with opened(self._core, begin):
            yield ToolLoop(self.error, steps)

    def tool_calls(self, name: str) -> list[ToolCall]:
        """The calls that the variable's generation made, with their results, in order. Waits."""
        return calls_of(self.get_meta_info(name))

    # -- branches --------------------------------------------------------------------------------------------

    def fork(
        self,
        size: int = 1,
        position_ids_offset: Sequence[int] | None = None,
        *,
        budget: Budget | None = None,
    ) -> ProgramStateGroup:
        """`size` states that continue from here independently. They share this state's text and variables.

        budget               what each of them may use
        position_ids_offset  one number per branch, for programs written for sglang; has no effect, as in
                             sglang
        """
        if type(size) is not int or size < 1:
            raise BadProgram(f"the number of branches must be at least 1, got {size!r}")
        if position_ids_offset is not None and len(position_ids_offset) != size:
            raise BadProgram(f"{len(position_ids_offset)} offsets for {size} forks; pass one for each")
        src = caller()
        forks = [ProgramState(core) for core in self._core.fork(size, src, budget)]
        for fork in forks:
            fork._forked_from = self
        return ProgramStateGroup(self, forks)

    @overload
    def map(self, fn: Callable[[ProgramState, I], None], items: Iterable[I]) -> list[ProgramState]: ...

    @overload
    def map(self, fn: Callable[[ProgramState, I], T], items: Iterable[I]) -> list[T]: ...

    def map(self, fn: Callable[[ProgramState, Any], Any], items: Iterable[Any]) -> list[Any]:
        """Call `fn(fork, item)` for each item, each on its own fork, in parallel on a limited number of
        threads. Returns the results in order; if a call returns None, its fork is the result. If calls
        raise, the forks are cancelled, and the first error in order is raised, which says of which item it
        is."""
        values = list(items)
        if not values:
            return []
        group = self.fork(len(values))

        def work(index: int) -> Any:
            try:
                result = fn(group[index], values[index])
            except BaseException as error:
                of_item(error, index, values[index], "map")
                raise
            return group[index] if result is None else result

        try:
            return in_threads([functools.partial(work, index) for index in range(len(values))], in_thread)
        except BaseException:
            group.cancel()
            raise

    def adopt(self, branch: ProgramState) -> None:
        """Continue with the text and variables of a fork, as if they had been added here. Waits for the
        fork. Raises its ProgramError."""
        run_here(self._core.adopt(branch.core, caller(), blocking))

    @contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> Iterator[ProgramState]:
        """One branch. At the end of the block its variables come back, each as a list of one."""
        group = self.fork(1, position_ids_offset)
        try:
            yield group[0]
        except BaseException:
            group[0].cancel()
            raise
        group.join()


@public
class Turn:
    """Returned by s.user(...) and similar methods: a turn that was already added, or the context manager
    that opens and closes one."""

    def __init__(self, state: ProgramState, role: str) -> None:
        self._state, self._role = state, role
        self.added = False

    def __str__(self) -> str:
        # In a text this would be a silent mistake.
        word = f"s.{self._role}(...)"
        raise BadProgram(
            f"{word} adds its turn by itself and cannot be used as text, at {caller()}; leave out the s."
        )

    def add_to(self, state: ProgramState) -> None:
        """`s += s.user(...)`: a turn that was already added is not added twice; an unused turn is added
        empty."""
        if state is not self._state:
            raise BadProgram(
                "this turn belongs to another state; use the function without a state: user(...)"
            )
        if not self.added:
            src = caller()
            state.core.submit(concat(RoleBegin(self._role, src=src), RoleEnd(self._role, src=src)), src)
            self.added = True

    def __enter__(self) -> ProgramState:
        if self.added:
            raise BadProgram(
                f"this turn of {self._role!r} was already added; leave out its text to use it in a with"
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
    """The forks of one state, in order."""

    def __init__(self, parent: ProgramState, states: Sequence[ProgramState]) -> None:
        self._parent = parent
        self._states = tuple(states)

    def __iadd__(self, other: object) -> ProgramStateGroup:
        """Add to every fork: text or a node to each; one element of a list to each; or the result of a
        function of the index."""
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
                    raise BadProgram(f"{len(other)} additions for {size} forks; pass one for each")
                return other
            case Callable():
                return [other(index) for index in range(size)]
            case _:
                raise TypeError(
                    "forks take text, a node, a list of these or a function of the index; "
                    f"got {type(other).__name__}"
                )

    def join(self, mode: str = GATHER) -> None:
        """Wait for all forks and end them. Raises the first fork's ProgramError, in order. `mode` decides
        what the parent gets:

        "gather_variable"     each variable that forks set becomes the list of their values, in order
        "concate_and_append"  the forks' text is added to the parent's, in order
        "dict"                each variable becomes {fork's number: value}
        "overwrite"           each variable becomes the last fork's value
        "error"               each variable becomes its value; a variable that two forks set, or that the
                              parent already had, raises BadProgram
        """
        src = caller()
        cores = [state.core for state in self._states]
        run_here(self._parent.core.join(cores, join_mode(mode), src, blocking))

    # -- choosing --------------------------------------------------------------------------------------------

    def race(self, timeout: float | None = None) -> ProgramState:
        """The first fork to finish everything that was added to it; the others are cancelled. Raises
        Timeout (all are cancelled), and the first fork's error if all failed."""
        return self.first_valid(lambda state: True, timeout)

    def first_valid(
        self, predicate: Callable[[ProgramState], object], timeout: float | None = None
    ) -> ProgramState:
        """The first fork to finish for which `predicate(fork)` is true; the others are cancelled. Raises
        NoWinner if there is none, Timeout after `timeout` seconds, and errors of the predicate."""
        return run_here(self._first_valid(predicate, timeout, blocking))

    def best_of(self, score: Callable[[ProgramState], float], timeout: float | None = None) -> ProgramState:
        """The fork with the highest `score(fork)`, the earliest if several have it. Forks that failed, or
        whose score is NaN, are ignored. Raises the same errors as first_valid."""
        return run_here(self._best_of(score, timeout, blocking))

    def vote(self, name: str, key: Callable[[Any], Any] | None = None, timeout: float | None = None) -> Vote:
        """The most common value of the variable `name` among the forks. `key` maps a value to what is
        compared. Forks that failed do not vote. Raises NoWinner, Timeout."""
        return run_here(self._vote(name, key, timeout, blocking))
