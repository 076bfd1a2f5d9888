"""ManyReq: a user's request for one prompt or several, once it is normalised: its size and its items.

How fields spread over items is each kind's own (`_item`); nothing here knows a field.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

from runtime.protocol.requests.base import BaseReq
from runtime.protocol.requests.batching import Spread


class ManyReq(BaseReq, dict=True):
    """Normalising sets `spread` and `items` beside the fields; until then it has no size."""

    @property
    def is_normalized(self) -> bool:
        return "spread" in self.__dict__

    @property
    def is_single(self) -> bool:
        return self._spread.single

    @property
    def batch_size(self) -> int:
        """Prompts, each counted once however many samples are made of it."""
        return self._spread.prompts

    @property
    def parallel_sample_num(self) -> int:
        return self._spread.copies

    @property
    def _spread(self) -> Spread:
        found: Spread | None = self.__dict__.get("spread")
        if found is None:
            raise AttributeError("normalize_batch_and_arguments() has not been called")
        return found

    def __len__(self) -> int:
        """Items: prompts times samples."""
        return self._spread.total

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Self]:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, index: int) -> Self:
        """Item `index`, itself normalised; always the same object. A single request is its only item."""
        spread = self._spread
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
