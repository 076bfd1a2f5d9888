"""ManyReq: a user's request for one prompt or several, once it is normalised: its size and its items.

How fields spread over items is each kind's own (`_item`); nothing here knows a field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from runtime.protocol.request_base import BaseReq
from runtime.protocol.requests.batching import Spread


class ManyReq(BaseReq, dict=True):
    """Normalising sets `spread` and `items` beside the fields; until then it has no size."""

    def set_size(self, spread: Spread) -> None:
        """The fields are normalised."""
        self.__dict__.update(spread=spread, items={})

    @property
    def is_normalized(self) -> bool:
        return "spread" in self.__dict__

    @property
    def spread(self) -> Spread:
        """How many prompts and samples there are."""
        try:
            spread: Spread = self.__dict__["spread"]
        except KeyError:
            raise AttributeError("normalize_batch_and_arguments() has not been called") from None
        return spread

    @property
    def is_single(self) -> bool:
        return self.spread.single

    @property
    def batch_size(self) -> int:
        """Prompts, each counted once however many samples of it are wanted."""
        return self.spread.prompts

    @property
    def parallel_sample_num(self) -> int:
        return self.spread.copies

    def regenerate_rid(self) -> str | list[str]:
        """Also for items that were taken out already."""
        rids = super().regenerate_rid()
        for index, item in self.__dict__.get("items", {}).items():
            item.rid = rids[index]
        return rids

    def __len__(self) -> int:
        """Items: prompts times samples."""
        return self.spread.total

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Self]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Self:
        """Item `index`, itself normalised; always the same object. A single request is its only item."""
        spread = self.spread
        if not -spread.total <= index < spread.total:
            raise IndexError(f"item {index} of a request with {spread.total}")
        if spread.single:
            return self
        index %= spread.total
        items: dict[int, Self] = self.__dict__["items"]
        if index not in items:
            items[index] = self._item(index)
        return items[index]

    def _item(self, index: int) -> Self:
        """A new request of item `index` alone."""
        raise TypeError(f"{type(self).__name__} has no items")
