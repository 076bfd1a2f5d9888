"""Choosing among branches: the first to finish, the first valid one, the best, the most common value. The
others are cancelled, and their requests to the backend aborted.

Knows states, no executors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sglang_dsl.concurrency.loop import LOOK_S
from sglang_dsl.concurrency.streams import Signal, Until
from sglang_dsl.errors import BadProgram, NoWinner, Timeout, again
from sglang_dsl.interpreter.core import Core
from sglang_dsl.interpreter.run import Mark
from sglang_dsl.ir import caller


class Branch(Protocol):
    """A state, blocking or async."""

    @property
    def core(self) -> Core: ...
    def cancel(self) -> None: ...


B = TypeVar("B", bound=Branch)


@dataclass(frozen=True, slots=True)
class Ended(Generic[B]):
    """A branch that has done everything that was queued. `error`: its error, or None."""

    index: int
    branch: B
    error: BaseException | None


@dataclass(frozen=True)
class Vote:
    """The result of a vote among branches.

    value   the most common value; if several are, the earliest branch's
    counts  pairs (value, number of branches), the most common first
    failed  how many branches had an error
    """

    value: Any
    counts: tuple[tuple[Any, int], ...]
    failed: int = 0

    @property
    def count(self) -> int:
        """How many branches have `value`."""
        return self.counts[0][1]

    @property
    def share(self) -> float:
        """`count` as a fraction of the branches that voted, 0 to 1."""
        return self.count / sum(count for _, count in self.counts)


def place_of(branches: Sequence[Branch]) -> dict[str, Any]:
    """Program and line, for an error."""
    return {"program": branches[0].core.program, "source": caller()}


class _Watch(Generic[B]):
    """Which branches have ended, as they do."""

    def __init__(self, branches: Sequence[B], timeout: float | None) -> None:
        if timeout is not None and not timeout > 0:
            raise BadProgram(f"timeout must be a positive number of seconds, got {timeout!r}")
        self.signal = Signal()
        self._timeout = timeout
        self._place = place_of(branches)
        self._until = None if timeout is None else time.monotonic() + timeout
        self._left: dict[int, tuple[B, Mark]] = {
            index: (branch, branch.core.watch(self.signal)) for index, branch in enumerate(branches)
        }

    def take_ended(self) -> list[Ended[B]]:
        found = []
        for index, (branch, mark) in list(self._left.items()):
            if mark.done:
                del self._left[index]
                found.append(Ended(index, branch, mark.error or branch.core.fault()))
        return found

    def ready(self) -> bool:
        return any(mark.done for _, mark in self._left.values())

    @property
    def over(self) -> bool:
        return not self._left

    @property
    def time_left(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def late(self) -> Timeout:
        return Timeout(
            f"{len(self._left)} branches did not finish within {self._timeout:g} s",
            retryable=True,
            hint="allow more time with timeout=...",
            **self._place,
        )


async def as_they_end(
    branches: Sequence[B], timeout: float | None, until: Until
) -> AsyncGenerator[Ended[B], None]:
    """The branches as they end. Raises Timeout."""
    watch = _Watch(branches, timeout)
    while not watch.over:
        if not await until(watch.signal, watch.ready, watch.time_left):
            raise watch.late()
        for one in watch.take_ended():
            yield one


class Race(Generic[B]):
    """The first branch that succeeds and that `accept` takes wins."""

    def __init__(self, branches: Sequence[B]) -> None:
        self.branches = branches
        self.winner: B | None = None
        self._failed: dict[int, BaseException] = {}
        self._refused: list[int] = []

    def take(self, ended: Ended[B], accepted: bool) -> bool:
        """Whether it is decided."""
        if ended.error is not None:
            self._failed[ended.index] = ended.error
        elif accepted:
            self.winner = ended.branch
            self.cancel_others()
            return True
        else:
            self._refused.append(ended.index)
        return False

    def cancel_others(self) -> None:
        for branch in self.branches:
            if branch is not self.winner:
                branch.cancel()

    def result(self) -> B:
        """Raises NoWinner, or the first branch's error where all failed."""
        if self.winner is not None:
            return self.winner
        if self._failed and not self._refused:
            error = self._failed[min(self._failed)]
            raise again(error)
        said = f"{len(self._refused)} were rejected"
        if self._failed:
            said += f", {len(self._failed)} failed"
        said = f"none of {len(self.branches)} branches was accepted: {said}"
        raise NoWinner(said, **place_of(self.branches)) from next(iter(self._failed.values()), None)


def count_votes(values: Sequence[Any], failed: int, place: Mapping[str, Any] | None = None) -> Vote:
    """The vote of these values, in the branches' order. They are compared by ==. Raises NoWinner for none."""
    counts: list[tuple[Any, int]] = []
    for value in values:
        for at, (known, count) in enumerate(counts):
            if known == value:
                counts[at] = (known, count + 1)
                break
        else:
            counts.append((value, 1))
    if not counts:
        raise NoWinner(f"no branch has a value for the vote; {failed} failed", **place or {})
    counts.sort(key=lambda pair: -pair[1])  # stable: the earliest first on a tie
    return Vote(counts[0][0], tuple(counts), failed)


class Best(Generic[B]):
    """The branch with the highest score; the earliest on a tie."""

    def __init__(self, branches: Sequence[B]) -> None:
        self._race = Race(branches)
        self._scores: dict[int, tuple[float, B]] = {}

    def take(self, ended: Ended[B], score: float) -> None:
        if ended.error is not None:
            self._race.take(ended, False)
        elif score == score:  # NaN is no score
            self._scores[ended.index] = (float(score), ended.branch)
        else:
            self._race.take(ended, False)

    def result(self) -> B:
        """Raises NoWinner, or the first branch's error where all failed."""
        if not self._scores:
            return self._race.result()
        best = max(self._scores, key=lambda index: (self._scores[index][0], -index))
        return self._scores[best][1]


def in_threads(work: Sequence[Callable[[], Any]], start: Callable[[Callable[[], object]], None]) -> list[Any]:
    """What each piece of work gives, run side by side; `start` begins one on a thread. Raises the first one's
    error, in order, once all have ended."""
    results: list[Any] = [None] * len(work)
    errors: dict[int, BaseException] = {}
    left = threading.Semaphore(0)

    def run(index: int) -> None:
        try:
            results[index] = work[index]()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors[index] = error
        finally:
            left.release()

    for index in range(len(work)):
        start(lambda index=index: run(index))  # type: ignore[misc]
    for _ in work:
        while not left.acquire(timeout=LOOK_S):
            pass
    if errors:
        raise errors[min(errors)]
    return results
