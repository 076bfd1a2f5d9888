"""While a cell runs, a thread reports to a View what the state generates. Knows no terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import msgspec

from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.execution.standing import Standing
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot

POLL_S = 0.05
"""How often forks are polled: unlike the state itself, they do not notify of new pieces."""

Look: TypeAlias = Callable[[Callable[[], None]], None]
"""Reports what is new, and then calls its argument before anything else is reported."""
ForkTexts: TypeAlias = Mapping[tuple[int, ...], tuple[str, ...]]


class View:
    """Shows a cell; what a subclass does not override is not shown. Only one thread at a time calls these
    methods, except `begin`, `end` and `wait`."""

    def begin(self, look: Look) -> None:
        """A cell begins. Code that is about to print something does it inside `look`."""

    def end(self) -> None:
        """The cell has ended, and everything was reported."""

    def open_turn(self, role: str) -> None:
        """A turn begins."""

    def add_text(self, text: str, *, generated: bool) -> None:
        """More text, in the open turn or outside of turns."""

    def end_generation(self, entry: Transcript) -> None:
        """A generation has ended; all of its text was reported."""

    def close_turn(self) -> None:
        """The turn ends."""

    def update(self, seen: Snapshot, changed: list[ForkSnapshot]) -> None:
        """The state by now, of its text that of this cell. `changed`: the forks with new text."""

    def wait(self, what: str | None) -> None:
        """The cell waits for this before it begins. None: no longer."""


class Follower:
    """Reports one cell to a view, on a thread of its own between start() and stop()."""

    def __init__(self, standing: Standing, view: View, forks_before: ForkTexts) -> None:
        self._core, self._view, self._forks_before = standing.core, view, forks_before
        self._since = self._seen = self._core.so_far()
        pieces = self._core.output.so_far()
        self._text = "".join(piece.text for piece in pieces)
        self._pieces, self._partial = len(pieces), 0
        self._lock = threading.RLock()
        self._stopped = False
        self._thread = threading.Thread(target=self._follow, name="following a cell", daemon=True)

    def start(self) -> None:
        """Report what there is, and from now on what is new."""
        self._view.begin(self.look)
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """Report the rest, and end the thread."""
        self._stopped = True
        self._core.output.notify()
        self._thread.join()
        self.look()
        self._view.end()

    def _follow(self) -> None:
        while not self._stopped:
            self.look()
            self._core.output.wait_for(
                lambda: self._stopped or len(self._core.output.so_far()) > self._pieces, POLL_S
            )

    def look(self, then: Callable[[], None] = lambda: None) -> None:
        """Report what is new; then call `then` before anything else is reported."""
        with self._lock:
            self._look()
            then()

    def _look(self) -> None:
        # The pieces are read first: constant text is in the transcript before it is a piece, so that pieces
        # which the transcript does not contain are those of the running generation.
        pieces = self._core.output.so_far()
        self._text += "".join(piece.text for piece in pieces[self._pieces :])
        self._pieces = len(pieces)
        transcript = self._core.so_far()
        for entry in transcript.entries(self._seen):
            self._report(entry)
        self._seen = transcript
        partial = self._text[transcript.length :]
        if len(partial) > self._partial:
            self._view.add_text(partial[self._partial :], generated=True)
            self._partial = len(partial)
        seen = self._core.snapshot()
        now = transcript.say(partial, chosen="") if partial else transcript
        self._view.update(
            msgspec.structs.replace(seen, transcript=now, since=self._since, partial=""),
            changed_forks(seen.forks, self._forks_before),
        )

    def _report(self, entry: Transcript) -> None:
        match entry.kind:
            case "open":
                self._view.open_turn(entry.value)
            case "close":
                self._view.close_turn()
            case "text" if entry.chosen is not None:
                if rest := entry.value[self._partial :]:
                    self._view.add_text(rest, generated=True)
                self._partial = 0
                self._view.end_generation(entry)
            case _:
                if entry.plain:
                    self._view.add_text(entry.plain, generated=False)


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
