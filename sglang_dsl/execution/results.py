"""Rows of a table as a batch's items, and a batch's results as a list that notebooks show as a table and that
can be converted to a DataFrame. Tables are recognized by their methods: no library is loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from runtime.protocol.registry import Registry
from sglang_dsl.conversation.requests import COUNTED
from sglang_dsl.state.program_state import ProgramState
from sglang_dsl.views.notebook import Page

T = TypeVar("T")
_TABLES: Registry[Any] = Registry(
    "table", {"DataFrame": "pandas:DataFrame"}, extras={"DataFrame": "notebook"}
)
_COSTS = ("calls", *COUNTED, "seconds")


class Batch(list[T]):
    """The results of a batch: finished states and, with on_error="return", errors in their places.

    arguments  the arguments of each item of the batch, in the order of the items; a state's `index` is the
               position of its item
    ordered    whether an error is in its item's place
    """

    def __init__(
        self,
        results: Iterable[T] = (),
        program: str = "",
        arguments: Sequence[Mapping[str, Any]] = (),
        *,
        ordered: bool = True,
    ) -> None:
        super().__init__(results)
        self._program, self._arguments, self._ordered = program, arguments, ordered

    def rows(self) -> list[dict[str, Any]]:
        """One per result: the item's arguments, its variables, what it cost (calls, tokens, seconds), and its
        error as text, None where there is none. Of two with one name a variable keeps it, then an argument;
        the other is named "name (argument)", "calls (usage)" or "error (batch)"."""
        parts = [self._parts(position, result) for position, result in enumerate(self)]
        taken: dict[str, str] = {}
        # The same for all rows, so that a column has one kind of value.
        for kind in ("variable", "argument", "usage", "batch"):
            for part in parts:
                for name in part[kind]:
                    taken.setdefault(name, kind)
        order = ("argument", "variable", "batch", "usage")
        return [
            {
                name if taken[name] == kind else f"{name} ({kind})": value
                for kind in order
                for name, value in part[kind].items()
            }
            for part in parts
        ]

    def _parts(self, position: int, result: Any) -> dict[str, Mapping[str, Any]]:
        variables: dict[str, Any] = {}
        usage: dict[str, Any] = dict.fromkeys(_COSTS)
        at, error = position if self._ordered else None, result
        if isinstance(result, ProgramState):
            seen = result.core.snapshot(None)
            variables = {name: one.value for name, one in seen.variables.items()}
            usage = {**seen.usage, "seconds": sum(call.seconds for call in seen.calls)}
            at, error = result.index, seen.error
        known = at is not None and at < len(self._arguments)
        return {
            "argument": self._arguments[at] if known and at is not None else {},
            "variable": variables,
            "usage": usage,
            "batch": {"error": None if error is None else f"{type(error).__name__}: {error}"},
        }

    def to_pandas(self) -> Any:
        """rows() as a pandas.DataFrame. Raises MissingExtra where pandas is not installed."""
        return _TABLES.load("DataFrame")(self.rows())

    def __repr__(self) -> str:
        failed = sum(isinstance(result, BaseException) for result in self)
        return f"Batch({len(self)} results{f', {failed} failed' if failed else ''})"

    def _page(self) -> Page:
        from sglang_dsl.views import listing  # for notebooks alone

        rows = self.rows()
        tokens = sum(row.get("completion_tokens") or 0 for row in rows)
        title = f"{self._program}: {self!r}, {tokens} tokens generated"
        labels = [f"item {at}: {row.get('error') or 'done'}" for at, row in enumerate(rows)]
        return Page(listing.batch(title, rows), listing.batch_graph(title, labels))

    def _repr_html_(self) -> str:
        return self._page().html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._page().bundle()


class Items:
    """The items of a batch. `arguments`: by name, of the items read so far."""

    def __init__(self, signature: inspect.Signature, items: Iterable[Any]) -> None:
        self._signature, self._items = signature, items
        self.arguments: list[Mapping[str, Any]] = []

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            self.arguments.append(self._named(item))
            yield item

    def _named(self, item: Any) -> Mapping[str, Any]:
        if isinstance(item, Mapping):
            return item
        try:
            return self._signature.bind_partial(*item).arguments
        except TypeError:  # raised where it is run
            return {}


@runtime_checkable
class Frame(Protocol):
    """A pandas DataFrame."""

    @property
    def columns(self) -> Iterable[Any]: ...
    def itertuples(self, index: bool, name: str | None) -> Iterator[tuple[Any, ...]]: ...
    def __len__(self) -> int: ...


class FrameRows:
    """The rows of a frame as dicts, each created when it is read."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = [str(name) for name in self._frame.columns]
        for values in self._frame.itertuples(index=False, name=None):
            yield dict(zip(names, values, strict=True))

    def __len__(self) -> int:
        return len(self._frame)


def rows_of(items: Any) -> Any:
    """The rows of a frame; other items as they are. A datasets.Dataset yields its rows as dicts itself."""
    return FrameRows(items) if isinstance(items, Frame) else items
