"""What both kinds of state have in common, and how variables are read. A state is based on a Core. Knows
neither blocking nor `await`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NoReturn, TypeVar, cast, overload

from runtime.formats.json_stream import JsonStream, JsonStreamError
from sglang_dsl.choices import Choice
from sglang_dsl.concurrency.streams import Piece, Until, awaiting
from sglang_dsl.errors import BadProgram, InvalidValue, ProgramError, WrongAddition, WrongAttribute
from sglang_dsl.errors.tracebacks import public
from sglang_dsl.interpreter.core import Checkpoint, Core
from sglang_dsl.interpreter.parameters import PARAMETERS, RUN_OPTIONS
from sglang_dsl.interpreter.run import Variable
from sglang_dsl.ir import Gen, Node, Select
from sglang_dsl.ir.growing import NOTHING, Growing
from sglang_dsl.ir.syntax import KEPT, marked
from sglang_dsl.ir.typed import must_be
from sglang_dsl.views.diagrams import calls_graph
from sglang_dsl.views.notebook import Displayed, Page
from sglang_dsl.views.snapshot import Snapshot

if TYPE_CHECKING:
    from typing_extensions import TypeForm

T = TypeVar("T", covariant=True)
V = TypeVar("V")
_OF_A_GEN = frozenset({*PARAMETERS, "timeout"})


class Checked:
    """Has the attributes of its class and no others: to set or read another one is an error that says what to
    write. Type checkers see none of this, and refuse the same."""

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
            written = f"{name}={value!r:.60}"
            return (
                f"{name!r} set on {kind} would have no effect: write gen(..., {written}), or "
                f"@function({written}) for all generations of a program"
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
class StateBase(Checked, Displayed, Generic[T]):
    """Base of both kinds of state. T is the type of their turns."""

    _FIELDS = frozenset({"_core", "_sync", "_forked_from"})
    _core: Core

    def _page(self, timeout_s: float | None) -> Page:
        from sglang_dsl.views import html  # for notebooks alone

        snapshot = self._core.snapshot(timeout_s)
        graph = calls_graph(snapshot.program, snapshot.calls)
        return Page(html.page(snapshot), graph, snapshot.running)

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
        # Closed at once when a reader leaves early.
        async with aclosing(variable.read(variable.ended, until)) as pieces:
            async for piece in pieces:
                if piece.text or (reasoning and piece.meta and "reasoning_content" in piece.meta):
                    yield piece
        variable.result()

    async def _objects(self, name: str, strings: bool, until: Until) -> AsyncGenerator[Any, None]:
        """A variable's value while its JSON is generated."""
        variable = await self._find_later(name, until)
        reading = _Objects(variable, strings)
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


# -- reading a variable --------------------------------------------------------------------------------------


def name_of(node: object) -> str:
    """The variable that a gen or select sets. Raises BadProgram for a node without a name, and for anything
    else."""
    if not isinstance(node, Gen | Select):
        raise BadProgram(
            f"read a variable by its name, or by the gen or select that sets it; got {node!r:.80}"
        )
    if node.name is None:
        raise BadProgram("this generation has no name, so there is no variable to read")
    return node.name


def checked(variable: Variable, value: Any, kind: TypeForm[V]) -> V:
    """`value`, if it is of the type `kind`. Raises InvalidValue. While a program is traced, a placeholder
    passes for a value of any type."""
    if variable.typed is None or variable.typed.name != "placeholder":
        try:
            must_be(value, kind)
        except ValueError as error:
            hint = "gen(name, type) reads it as one"
            raise InvalidValue(
                f"the value has another type: {error}", variable=variable.name, hint=hint
            ) from error
    return cast(V, value)


def choice_of(name: str, meta: dict[str, Any]) -> Choice:
    """Raises BadProgram."""
    try:
        return Choice.of(meta)
    except KeyError as error:
        raise BadProgram(f"{name!r} was not set by select(...), or by gen with choices") from error


class _Objects:
    """A variable's JSON as values while it is generated: takes its pieces in order and yields the values to
    show."""

    def __init__(self, variable: Variable, strings: bool) -> None:
        self._variable = variable
        self._typed = variable.typed
        self._stream = JsonStream(strings=strings)
        # A node that was read from JSON has no type any more: it shows plain data.
        read = self._typed is not None and self._typed.adapter is not None
        self._growing = Growing(self._typed.annotation) if self._typed is not None and read else None
        # Text that is no JSON is shown at its end.
        self._is_json = self._typed is None or self._typed.kind == "json"

    def take(self, piece: str) -> Iterator[Any]:
        """The value after one more piece, if it shows more than before."""
        if not self._is_json or isinstance(self._variable.raw, list):
            return
        try:
            grown = self._stream.feed(piece)
        except JsonStreamError:
            self._is_json = False  # reported at the end
            return
        if grown and (shown := self._shown()) is not NOTHING:
            yield shown

    def end(self) -> Iterator[Any]:
        """The complete value. Raises ProgramError: the variable's own error, or the text is not JSON."""
        value = self._variable.result()
        if self._typed is not None or isinstance(self._variable.raw, list):
            yield value
            return
        try:
            grown = self._stream.close()
        except JsonStreamError as error:
            raise self._broken(error) from error
        if grown:
            yield self._shown()

    def _shown(self) -> Any:
        value, growing = self._stream.value, self._growing
        return value if growing is None else growing.value(value, self._stream.writing)

    def _broken(self, error: JsonStreamError) -> InvalidValue:
        cut = (self._variable.meta.get("finish_reason") or {}).get("type") == "length"
        return InvalidValue(
            f"the text is not JSON: {error}",
            variable=self._variable.name,
            hint="it was cut off: increase max_tokens" if cut else None,
        )
