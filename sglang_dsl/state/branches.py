"""The forks of one state as a group, and choosing among them: the first to finish, the first valid one, the
best, the most common value. The others are cancelled, and their requests to the backend aborted.

Knows neither blocking nor `await`, and no executors.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from sglang_dsl.concurrency.loop import LOOK_S
from sglang_dsl.concurrency.streams import Signal, Until, value_of
from sglang_dsl.errors import BadProgram, NoWinner, Timeout, again
from sglang_dsl.errors.tracebacks import public
from sglang_dsl.interpreter.run import Mark
from sglang_dsl.ir import caller
from sglang_dsl.state.base import Checked, StateBase
from sglang_dsl.views.diagrams import calls_graph
from sglang_dsl.views.notebook import Displayed, Page
from sglang_dsl.views.snapshot import calls_within

S = TypeVar("S", bound=StateBase[Any])


@dataclass(frozen=True, slots=True)
class Ended(Generic[S]):
    """A branch that has evaluated everything that was queued. `error`: its error, or None."""

    index: int
    branch: S
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


async def as_they_end(
    branches: Sequence[S], timeout: float | None, until: Until
) -> AsyncGenerator[Ended[S], None]:
    """The branches as they end. Raises Timeout."""
    if timeout is not None and not timeout > 0:
        raise BadProgram(f"timeout must be a positive number of seconds, got {timeout!r}")
    end = None if timeout is None else time.monotonic() + timeout
    source, signal = _source(branches), Signal()
    running: dict[int, Mark] = {at: branch.core.watch(signal) for at, branch in enumerate(branches)}

    def some_ended() -> bool:
        return any(mark.done for mark in running.values())

    while running:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not await until(signal, some_ended, left):
            raise Timeout(
                f"{len(running)} branches did not finish within {timeout:g} s",
                retryable=True,
                hint="allow more time with timeout=...",
                **source,
            )
        for index in [index for index, mark in running.items() if mark.done]:
            mark, branch = running.pop(index), branches[index]
            yield Ended(index, branch, mark.error or branch.core.fault())


def _source(branches: Sequence[StateBase[Any]]) -> dict[str, Any]:
    """Program and line, for an error."""
    return {"program": branches[0].core.program, "source": caller()}


def count_votes(values: Sequence[Any], failed: int, source: Mapping[str, Any] | None = None) -> Vote:
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
        raise NoWinner(f"no branch has a value for the vote; {failed} failed", **source or {})
    counts.sort(key=lambda pair: -pair[1])  # stable: the earliest first on a tie
    return Vote(counts[0][0], tuple(counts), failed)


@public
class Group(Checked, Displayed, Generic[S]):
    """The forks of one state, in order."""

    _FIELDS = frozenset({"_parent", "_states", "_group", "_joined"})
    _states: Sequence[S]

    def _variable(self, name: str, end: str) -> str:
        return f"; its forks have: forks[0].{name}, or the variable forks[0][{name!r}]{end}"

    def _page(self, timeout_s: float | None) -> Page:
        from sglang_dsl.views import html  # for notebooks alone

        end = None if timeout_s is None else time.monotonic() + timeout_s
        snapshots = []
        for state in self._states:
            left = None if end is None else max(0.0, end - time.monotonic())
            snapshots.append(state.core.snapshot(left))
        program, calls = snapshots[0].program, calls_within(snapshots)
        running = any(one.running for one in snapshots)
        return Page(html.group(snapshots), calls_graph(program, calls), running)

    def __repr__(self) -> str:
        running = sum(state.core.snapshot().running for state in self._states)
        forks = f"{len(self._states)} fork{'' if len(self._states) == 1 else 's'}"
        return f"{type(self).__name__}({forks}{f', {running} running' if running else ''})"

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> S:
        try:
            return self._states[index]
        except TypeError as error:
            raise BadProgram(
                f"forks are numbered, got {index!r:.80}; [fork[name] for fork in forks] has a variable of "
                "each, and after forks.join() s[name] is their list"
            ) from error

    def __setitem__(self, index: int, state: S) -> None:
        # `forks[i] += x` ends with this assignment.
        if self._states[index] is not state:
            raise BadProgram("a fork cannot be replaced; use forks[i] += ... to add to it")

    def __iter__(self) -> Iterator[S]:
        return iter(self._states)

    async def _first_valid(self, predicate: Callable[[S], Any], timeout: float | None, until: Until) -> S:
        failed: dict[int, BaseException] = {}
        try:
            # Closed at once when the race is decided.
            async with aclosing(as_they_end(self._states, timeout, until)) as ends:
                async for ended in ends:
                    if ended.error is not None:
                        failed[ended.index] = ended.error
                    elif await value_of(predicate(ended.branch)):
                        for state in self._states:
                            if state is not ended.branch:
                                state.cancel()
                        return ended.branch
        except BaseException:
            self.cancel()
            raise
        raise self._no_winner(failed)

    async def _best_of(self, score: Callable[[S], Any], timeout: float | None, until: Until) -> S:
        failed: dict[int, BaseException] = {}
        scores: dict[int, float] = {}
        try:
            async for ended in as_they_end(self._states, timeout, until):
                if ended.error is not None:
                    failed[ended.index] = ended.error
                    continue
                value = float(await value_of(score(ended.branch)))
                if value == value:  # NaN is no score
                    scores[ended.index] = value
        except BaseException:
            self.cancel()
            raise
        if not scores:
            raise self._no_winner(failed)
        return self._states[max(scores, key=lambda index: (scores[index], -index))]

    async def _vote(
        self, name: str, key: Callable[[Any], Any] | None, timeout: float | None, until: Until
    ) -> Vote:
        values: dict[int, Any] = {}
        try:
            async for ended in as_they_end(self._states, timeout, until):
                if ended.error is None:
                    variable = await ended.branch._find_later(name, until)
                    await until(variable, lambda v=variable: v.done)
                    value = variable.result()
                    values[ended.index] = value if key is None else key(value)
        except BaseException:
            self.cancel()
            raise
        votes, failed = [values[index] for index in sorted(values)], len(self._states) - len(values)
        return count_votes(votes, failed, _source(self._states))

    def _no_winner(self, failed: Mapping[int, BaseException]) -> BaseException:
        """The first branch's error if all failed; else NoWinner."""
        rejected = len(self._states) - len(failed)
        if not rejected:
            return again(failed[min(failed)])
        message = f"none of {len(self._states)} branches was accepted: {rejected} were rejected"
        if failed:
            message += f", {len(failed)} failed"
        error = NoWinner(message, **_source(self._states))
        error.__cause__ = next(iter(failed.values()), None)
        return error

    def cancel(self) -> None:
        """Stop all forks."""
        for state in self._states:
            state.cancel()


def in_threads(work: Sequence[Callable[[], Any]], start: Callable[[Callable[[], object]], None]) -> list[Any]:
    """The results of pieces of work that run in parallel; `start` begins one on a thread. Raises the first
    one's error, in order, when all have ended."""
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
