"""While a cell runs: what its state says, told to a View as it comes. Knows no terminal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.execution.standing import Standing
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot

LOOK_S = 0.05
"""How long it waits for a piece before it looks at the forks, which tell nobody."""


class Look(Protocol):
    """Tell what there is by now; then do what is given, before more is told."""

    def __call__(self, then: Callable[[], None] = ...) -> None: ...


class View(Protocol):
    """What shows a cell. All but `waits`, `begins` and `over` is called by one thread at a time."""

    def begins(self, look: Look) -> None:
        """A cell begins; `look` is for whoever is about to print something."""

    def over(self) -> None:
        """It has ended, and all was told."""

    def opens(self, role: str) -> None:
        """A turn begins."""

    def says(self, text: str, *, generated: bool) -> None:
        """A piece of the turn that is open, or of loose text."""

    def ends(self, entry: Transcript) -> None:
        """A generation has ended, of which all pieces were told."""

    def closes(self) -> None:
        """The turn is over."""

    def looks(self, seen: Snapshot, forks: list[ForkSnapshot]) -> None:
        """How it stands: what this cell said, by now, and its forks."""

    def waits(self, what: str | None) -> None:
        """The cell cannot begin before this is there; None: now it can."""


class Follower:
    """Of one cell, on a thread of its own, between start() and stop(). `look()` tells what there is now;
    whoever is about to print something calls it before, so that all is shown in order."""

    def __init__(self, standing: Standing, view: View) -> None:
        self._core, self._view = standing.core, view
        self._since = self._seen = self._core.so_far()
        self._text = "".join(piece.text for piece in self._core.output.so_far())
        self._heard = len(self._core.output.so_far())
        self._partial = 0
        self._lock = threading.RLock()
        self._over = False
        self._thread = threading.Thread(target=self._follow, name="following a cell", daemon=True)

    def start(self) -> None:
        """Begin to look: at once, and then whenever there is something new."""
        self._view.begins(self.look)
        self.look()
        self._thread.start()

    def stop(self) -> None:
        """Look once more, and no further."""
        self._over = True
        self._core.output.notify()
        self._thread.join()
        self.look()
        self._view.over()

    def _follow(self) -> None:
        while not self._over:
            self.look()
            self._core.output.wait_for(self._more, LOOK_S)

    def _more(self) -> bool:
        return self._over or len(self._core.output.so_far()) > self._heard

    def look(self, then: Callable[[], None] = lambda: None) -> None:
        """Tell the view what is new."""
        with self._lock:
            self._look()
            then()

    def _look(self) -> None:
        # The pieces first: what is constant stands in the transcript before it is a piece, so that pieces
        # which the transcript does not have are those of the generation under way.
        pieces = self._core.output.so_far()
        self._text += "".join(piece.text for piece in pieces[self._heard :])
        self._heard = len(pieces)
        said = self._core.so_far()
        for entry in said.entries(self._seen):
            self._tell(entry)
        self._seen = said
        partial = self._text[said.length :]
        if len(partial) > self._partial:
            self._view.says(partial[self._partial :], generated=True)
            self._partial = len(partial)
        seen = self._core.snapshot()
        now = said.say(partial, chosen="") if partial else said
        forks = list(seen.forks)
        self._view.looks(msgspec.structs.replace(seen, transcript=now, since=self._since, partial=""), forks)

    def _tell(self, entry: Transcript) -> None:
        match entry.kind:
            case "open":
                self._view.opens(entry.value)
            case "close":
                self._view.closes()
            case "text" if entry.chosen is not None:
                if rest := entry.value[self._partial :]:
                    self._view.says(rest, generated=True)
                self._partial = 0
                self._view.ends(entry)
            case _:
                if entry.plain:
                    self._view.says(entry.plain, generated=False)


def content(fork: ForkSnapshot) -> tuple[str, ...]:
    """What its branches said, to tell whether there is more."""
    return tuple(said_by(branch) for branch in fork.branches)


def said_by(branch: Snapshot) -> str:
    """What a branch said since it was forked, what is under way included."""
    said = branch.transcript.text(branch.since)
    pending = "".join(
        one.text for one in branch.variables.values() if one.status == "pending" and isinstance(one.text, str)
    )
    return said + pending


class News:
    """Of the forks of a cell: those that say other than at its first look. A fork that is joined is the same
    as before, if its branches are."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[str, ...]] | None = None

    def of(self, forks: Sequence[ForkSnapshot]) -> list[ForkSnapshot]:
        """The first time: none."""
        if self._known is None:
            self._known = {fork.branches[0].branch: content(fork) for fork in forks}
        return [fork for fork in forks if self._known.get(fork.branches[0].branch) != content(fork)]
