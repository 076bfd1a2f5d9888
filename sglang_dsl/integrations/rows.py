"""Tables as items of a batch. Loads no library: a table is known by what it can do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Frame(Protocol):
    """A pandas DataFrame, as far as it is read here."""

    @property
    def columns(self) -> Iterable[Any]: ...
    def itertuples(self, index: bool, name: str | None) -> Iterator[tuple[Any, ...]]: ...
    def __len__(self) -> int: ...


class FrameRows:
    """The rows of a frame as dicts, each made when it is read."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = [str(name) for name in self._frame.columns]
        for values in self._frame.itertuples(index=False, name=None):
            yield dict(zip(names, values, strict=True))

    def __len__(self) -> int:
        return len(self._frame)


def rows_of(items: Any) -> Any:
    """`items` of a batch; of a frame, its rows. A datasets.Dataset gives its rows as dicts by itself."""
    return FrameRows(items) if isinstance(items, Frame) else items
