"""Transcript: what was said so far. Immutable; forks share it. Knows no template, no backend and no
variables' values.

A linked list of entries, newest last, so that adding is O(1) however long the conversation is. Plain text,
for people and for variables that record a scope, writes a turn as "USER: ...\\n"; what the model sees is
rendered from the messages where the checkpoint is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from runtime.protocol.messages import RAW_ROLE, Message
from sglang_dsl.backends.base import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    """One entry and all before it.

    kind     root; text: a piece of text; open: a turn of `value` begins; close: it ends
    value    the piece, or the role
    role     the turn that is open after this entry, None outside
    length   plain-text characters up to here
    chosen   for a generated piece, the name of its variable, "" where it has none; None for constant text
    turn     for close: the finished message; `before` is what stood before the turn
    """

    EMPTY: ClassVar[Transcript]

    prev: Transcript | None = None
    kind: Literal["root", "text", "open", "close"] = "root"
    value: str = ""
    role: str | None = None
    length: int = 0
    chosen: str | None = None
    turn: Message | None = None
    before: Transcript | None = None

    def say(self, text: str, *, chosen: str | None = None) -> Transcript:
        """With `text` added, verbatim."""
        if not text and chosen is None:
            return self
        return Transcript(self, "text", text, self.role, self.length + len(text), chosen)

    def open(self, role: str) -> Transcript:
        """With a turn of `role` begun. Raises ValueError inside another turn."""
        if self.role is not None:
            raise ValueError(
                f"a turn of {role!r} cannot begin inside a turn of {self.role!r}; end that first"
            )
        return Transcript(self, "open", role, role, self.length + len(opening(role)))

    def close(self) -> Transcript:
        """With the open turn ended. Raises ValueError where none is open."""
        if self.role is None:
            raise ValueError("no turn is open")
        begin, content = self._open_turn()
        turn = Message(role=self.role, content=content)
        return Transcript(self, "close", self.role, None, self.length + len(CLOSING), None, turn, begin.prev)

    def _open_turn(self) -> tuple[Transcript, str]:
        """The entry that opened the turn, and what was said in it since."""
        pieces: list[str] = []
        at = self
        while at.kind != "open":
            pieces.append(at.value)
            assert at.prev is not None
            at = at.prev
        return at, "".join(reversed(pieces))

    def entries(self, since: Transcript | None = None) -> list[Transcript]:
        """The entries after `since` (default: all), oldest first."""
        found: list[Transcript] = []
        at: Transcript | None = self
        while at is not None and at is not since and at.kind != "root":
            found.append(at)
            at = at.prev
        found.reverse()
        return found

    def text(self, since: Transcript | None = None) -> str:
        """Plain text of the entries after `since` (default: all)."""
        return "".join(entry.plain for entry in self.entries(since))

    @property
    def plain(self) -> str:
        """Plain text of this one entry."""
        match self.kind:
            case "text":
                return self.value
            case "open":
                return opening(self.value)
            case "close":
                return CLOSING
            case _:
                return ""

    def replay(self, onto: Transcript, since: Transcript | None = None) -> Transcript:
        """`onto` with the entries after `since` added. Raises ValueError where turns would nest."""
        for entry in self.entries(since):
            match entry.kind:
                case "open":
                    onto = onto.open(entry.value)
                case "close":
                    onto = onto.close()
                case _:
                    onto = onto.say(entry.value, chosen=entry.chosen)
        return onto

    def messages(self) -> tuple[Message, ...]:
        """Turns in order, text outside turns as role "raw"; a turn still open is last and marked open."""
        return tuple(reversed(list(self._backwards())))

    def _backwards(self) -> Iterator[Message]:
        at: Transcript | None = self
        if self.role is not None:
            begin, content = self._open_turn()
            yield Message(role=self.role, content=content, open=True)
            at = begin.prev
        raw: list[str] = []
        while at is not None:
            if at.kind == "text":
                raw.append(at.value)
                at = at.prev
                continue
            if any(raw):
                yield Message(role=RAW_ROLE, content="".join(reversed(raw)))
            raw = []
            if at.turn is not None:
                yield at.turn
            at = at.before if at.kind == "close" else at.prev

    def prompt(self) -> Prompt:
        """What a generation that continues here is given. Its last message is open: outside turns that is raw
        text, empty where a turn has just ended, so that nothing is put between."""
        messages = self.messages()
        if not messages or (messages[-1].role != RAW_ROLE and not messages[-1].open):
            return Prompt((*messages, Message(role=RAW_ROLE, open=True)))
        last = messages[-1]
        return Prompt((*messages[:-1], Message(role=last.role, content=last.content, open=True)))


Transcript.EMPTY = Transcript()
CLOSING = "\n"


def opening(role: str) -> str:
    """How plain text begins a turn."""
    return f"{role.upper()}: "
