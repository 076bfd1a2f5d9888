"""While a cell runs, a thread reports its state to a View. Knows no terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import msgspec

from sglang_dsl.execution.standing import Standing
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot

POLL_S = 0.05
"""How often forks are polled: unlike the state itself, they do not notify of new pieces."""

Look: TypeAlias = Callable[[Callable[[], None]], None]
"""Reports the state, and then calls its argument before it is reported again."""
ForkTexts: TypeAlias = Mapping[tuple[int, ...], tuple[str, ...]]


class View:
    """Shows a cell; what a subclass does not override is not shown."""

    def begin(self, look: Look) -> None:
        """A cell begins. Code that is about to print something does it inside `look`."""

    def update(self, seen: Snapshot, changed: list[ForkSnapshot]) -> None:
        """The state by now; `seen.since` is its begin. `changed`: the forks with new text."""

    def end(self) -> None:
        """The cell has ended."""

    def wait(self, what: str | None) -> None:
        """The cell waits for this before it begins. None: no longer."""


class Follower:
    """Reports one cell to a view, on a thread of its own between start() and stop()."""

    def __init__(self, standing: Standing, view: View, forks_before: ForkTexts) -> None:
        self._standing, self._view, self._forks_before = standing, view, forks_before
        self._core = standing.core
        self._since = self._core.so_far()
        self._lock = threading.RLock()
        self._pieces, self._stopped = 0, False
        self._thread = threading.Thread(target=self._follow, name="following a cell", daemon=True)

    def start(self) -> None:
        self._view.begin(self.look)
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """Report the state a last time, and end the thread."""
        self._stopped = True
        self._core.output.notify()
        self._thread.join()
        self.look()
        self._view.end()

    def _follow(self) -> None:
        while not self._stopped:
            self._pieces = len(self._core.output.so_far())
            self.look()
            self._core.output.wait_for(
                lambda: self._stopped or len(self._core.output.so_far()) > self._pieces, POLL_S
            )

    def look(self, then: Callable[[], None] = lambda: None) -> None:
        """Report the state; then call `then` before it is reported again."""
        with self._lock:
            seen = self._core.snapshot()
            # The snapshot of a stopped state has no partial text.
            partial = self._standing.partial() if self._stopped else seen.partial
            seen = msgspec.structs.replace(seen, since=self._since, partial=partial)
            self._view.update(seen, changed_forks(seen.forks, self._forks_before))
            then()


def branch_text(branch: Snapshot) -> str:
    """The text of a branch since it was forked, including running generations."""
    pending = (one.text for one in branch.variables.values() if one.status == "pending")
    texts = (text for text in pending if isinstance(text, str))
    return branch.transcript.text(branch.since) + "".join(texts)


def fork_texts(forks: Iterable[ForkSnapshot]) -> ForkTexts:
    """The texts of each fork's branches, by the number of its first branch. A join changes neither."""
    return {fork.branches[0].branch: tuple(map(branch_text, fork.branches)) for fork in forks}


def changed_forks(forks: Iterable[ForkSnapshot], before: ForkTexts) -> list[ForkSnapshot]:
    """The forks whose texts are new or other than `before`."""
    return [fork for fork in forks if fork_texts([fork]).items() - before.items()]
