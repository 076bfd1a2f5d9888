"""What a program's readers wait for.

    Variable    a named value to come, and the stream of pieces it arrives in
    Mark        a point in a program's queue: what was said up to there, or why it failed

Knows no nodes and no backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sglang_dsl.concurrency.streams import Piece, Signal, Stream, Until
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import MissingVariable, again, near
from sglang_dsl.errors.tracebacks import caller
from sglang_dsl.ir.typed import Typed
from sglang_dsl.views.snapshot import VariableSnapshot

_NOTHING: dict[str, Any] = {}  # what was said of a variable before it is there


def missing(name: str, known: Iterable[str], program: str) -> MissingVariable:
    """The error of a variable that nothing sets."""
    names = list(known)
    shown = ", ".join(map(repr, names)) or "none"
    return MissingVariable(
        f"no variable {name!r}; known: {shown}{near(name, names)}",
        program=program,
        variable=name,
        source=caller(),
        hint=None if names else f"it is set by what is added to the state: s += gen({name!r})",
    )


class Variable(Stream):
    """One setting of a name, with the pieces it comes in. Ends exactly once, with a value or with an error.
    `typed`: as what its text is read; `raw`: the text or texts, where they were generated, also when they
    could not be read."""

    __slots__ = ("done", "error", "meta", "name", "raw", "typed", "value")

    def __init__(self, name: str | None, typed: Typed | None = None) -> None:
        self._wakers = []
        self.pieces = ()
        self.name, self.typed = name, typed
        self.raw: str | list[str] | None = None
        self.value: Any = None
        self.meta: dict[str, Any] = _NOTHING
        self.error: BaseException | None = None
        self.done = False

    def settle(self, value: Any, meta: dict[str, Any] | None = None) -> None:
        """The value is there."""
        self.value, self.meta = value, meta or {}
        self.done = True
        self.notify()

    def so_far(self) -> Sequence[Piece]:
        """The pieces that there are by now; one for a value that was not streamed, made when it is read."""
        if not self.pieces and self.done and self.error is None:
            text = self.value if self.raw is None else self.raw
            text = text[0] if isinstance(text, list) and text else text
            self.pieces = [Piece(str(text), self.meta)]
        return self.pieces

    def fail(self, error: BaseException) -> None:
        self.error, self.done = error, True
        self.notify()

    def ended(self) -> int | None:
        """How many pieces there are, once there will be no more."""
        return len(self.so_far()) if self.done else None

    def result(self) -> Any:
        if self.error is not None:
            raise again(self.error)
        return self.value

    def text(self) -> Any:
        """What was generated, as it was written, once it is there. Raises the program's error where nothing
        was."""
        return self.result() if self.raw is None else self.raw

    def snapshot(self) -> VariableSnapshot:
        """How it stands now; does not wait."""
        done = self.done  # before what is set before it
        text = "".join(piece.text for piece in self.pieces) if self.raw is None else self.raw
        name = self.name or ""
        if not done:
            return VariableSnapshot(name, "pending", text)
        if self.error is not None:
            return VariableSnapshot(name, "failed", text, None, self.error, self.meta)
        if self.raw is None and isinstance(self.value, str):
            text = self.value
        return VariableSnapshot(name, "done", text, self.value, None, self.meta)


class Mark:
    """A point in the queue. `index`: how many streamed pieces stood before it."""

    __slots__ = ("done", "error", "index", "signal", "transcript")

    def __init__(self, signal: Signal | None = None) -> None:
        self.transcript = Transcript.EMPTY
        self.error: BaseException | None = None
        self.index: int | None = None
        self.done = False
        self.signal = signal or Signal()

    def reach(self, transcript: Transcript, error: BaseException | None, index: int) -> None:
        self.transcript, self.error, self.index, self.done = transcript, error, index, True
        self.signal.notify()

    def result(self) -> Transcript:
        if self.error is not None:
            raise again(self.error)
        return self.transcript

    async def reached(self, until: Until) -> None:
        """Wait for it."""
        if not self.done:
            await until(self.signal, lambda: self.done)

    async def wait(self, until: Until) -> Transcript:
        """What was said up to here; waits. Raises what went wrong before it."""
        await self.reached(until)
        return self.result()
