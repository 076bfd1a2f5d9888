"""PageAllocator: which KV slots of the pool are free; hands out contiguous runs where it can. Arithmetic on
runs.

It knows neither sequences nor prefixes: who holds a slot that is not free is not its business.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from runtime.plan import Run
from runtime.protocol.errors import BadRequest, InternalFault


def total(runs: Iterable[Run]) -> int:
    """Slots in `runs`."""
    return sum(run.length for run in runs)


def join(runs: Iterable[Run]) -> list[Run]:
    """The same slots in the same order, adjacent runs made one, empty ones dropped."""
    joined: list[Run] = []
    for run in runs:
        extend(joined, run)
    return joined


def extend(runs: list[Run], run: Run) -> None:
    """Append `run` to `runs` in place, lengthening the last one where they touch."""
    first, count = run
    if runs:
        start, length = runs[-1]
        if start + length == first:
            runs[-1] = Run(start, length + count)
            return
    if count:
        runs.append(run)


def split(runs: Sequence[Run], at: int) -> tuple[list[Run], list[Run]]:
    """The first `at` slots of `runs`, and the rest. Raises InternalFault when there are fewer."""
    head: list[Run] = []
    for index, run in enumerate(runs):
        if at < run.length:
            if not at:
                return head, list(runs[index:])
            head.append(Run(run.start, at))
            return head, [Run(run.start + at, run.length - at), *runs[index + 1 :]]
        head.append(run)
        at -= run.length
    if at:
        raise InternalFault(f"{at} slots more asked of {list(runs)} than there are", where="cache.pages")
    return head, []


class PageAllocator:
    """Free pages of a pool of `slots` slots, as sorted runs that coalesce. All lengths are in slots.

    A pool that is no multiple of `page_size` leaves its last slots unused. Runs handed out start and end on
    page boundaries. Best fit: a request gets the smallest free run that holds it; the largest ones when none
    does.
    """

    def __init__(self, slots: int, page_size: int = 1) -> None:
        if page_size < 1 or slots < page_size:
            raise BadRequest(
                f"a pool of {slots} slots holds no page of {page_size}",
                where="page_size",
                hint="make the pool larger",
            )
        self.page_size = page_size
        self.slots = slots - slots % page_size
        self.free = self.slots
        self._starts = [0]  # of the free runs, ascending
        self._lengths = {0: self.slots}
        self._sizes = [(self.slots, 0)]  # (length, start), ascending

    def ceil(self, slots: int) -> int:
        """`slots` rounded up to whole pages."""
        return -(-slots // self.page_size) * self.page_size

    def alloc(self, need: int, wish: int = 0, after: int = -1) -> list[Run] | None:
        """`need` slots, rounded up to pages; None, and no change, when fewer are free.

        Up to `wish` slots are given when they come in one piece with the needed ones. `after`: a slot the
        first run should follow directly, if it can, so that a growing tail stays in one run.
        """
        need = self.ceil(need)
        wish = max(need, self.ceil(wish))
        if need > self.free:
            return None
        runs: list[Run] = []
        left = need
        if after in self._lengths:
            run = self._take(after, min(wish, self._lengths[after]))
            runs.append(run)
            left -= run.length
        while left > 0:
            extra = wish - (need - left)
            index = bisect_left(self._sizes, (extra, -1))
            if index == len(
                self._sizes
            ):  # none holds the wish: the smallest that holds the need, else the largest
                index = min(bisect_left(self._sizes, (left, -1)), len(self._sizes) - 1)
            length, start = self._sizes[index]
            run = self._take(start, min(length, extra))
            runs.append(run)
            left -= run.length
        return join(runs)

    def release(self, runs: Iterable[Run]) -> None:
        """Take slots back. Raises InternalFault for slots that are free, or no pages of the pool."""
        for run in runs:
            self._give(run)

    def free_runs(self) -> list[Run]:
        """The free runs in ascending order (a copy)."""
        return [Run(start, self._lengths[start]) for start in self._starts]

    def check(self) -> None:
        """Raise InternalFault when the number of free slots is not that of the free runs."""
        counted = sum(self._lengths.values())
        if counted != self.free:
            raise InternalFault(f"{self.free} slots are counted as free, {counted} are", where="cache.pages")

    def _take(self, start: int, length: int) -> Run:
        have = self._drop(start)
        if have > length:
            self._add(start + length, have - length)
        self.free -= length
        return Run(start, length)

    def _give(self, run: Run) -> None:
        start, length = run
        if not length:
            return
        if (
            start < 0
            or length < 0
            or start + length > self.slots
            or start % self.page_size
            or length % self.page_size
        ):
            raise InternalFault(
                f"slots {start}..{start + length - 1} are no pages of this pool "
                f"({self.slots} slots, page size {self.page_size})",
                where="cache.pages",
            )
        end = start + length
        index = bisect_left(self._starts, start)
        before = self._starts[index - 1] if index else -1
        touches = bool(index) and before + self._lengths[before] >= start
        following = self._starts[index] if index < len(self._starts) else -1
        if (touches and before + self._lengths[before] > start) or (following >= 0 and following < end):
            raise InternalFault(f"slots {start}..{end - 1} are freed twice", where="cache.pages")
        if following == end:
            length += self._drop(following)
        if touches:
            length += self._drop(before)
            start = before
        self._add(start, length)
        self.free += run.length

    def _add(self, start: int, length: int) -> None:
        insort(self._starts, start)
        self._lengths[start] = length
        insort(self._sizes, (length, start))

    def _drop(self, start: int) -> int:
        length = self._lengths.pop(start)
        del self._starts[bisect_left(self._starts, start)]
        del self._sizes[bisect_left(self._sizes, (length, start))]
        return length
