"""Transcript: what was said so far. Immutable; forks share it. Knows no template, no backend and no
variables' values.

A linked list of entries, newest last, so that adding is O(1) however long the conversation is. Plain text,
for people and for variables that record a scope, writes a turn as "USER: ...\\n"; what the model sees is
rendered from the messages where the checkpoint is known.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias

import msgspec

from runtime.protocol.messages import RAW_ROLE, Message, ToolCall
from sglang_dsl.conversation.requests import Prompt
from sglang_dsl.ir import Gen, Select

Content: TypeAlias = "str | list[dict[str, Any]]"


class Generation(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What a generated piece came of: the node that asked for it, and what the backend said with it."""

    node: Gen[Any] | Select | None = None
    meta: Mapping[str, Any] = {}


class Transcript(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One entry and all before it. The garbage collector ignores it: it is never part of a cycle.

    kind     root; text: a piece of text; open: a turn of `value` begins; close: it ends; media: a picture, a
             video or a sound
    value    the piece, the role, or what stands for media in plain text
    role     the turn that is open after this entry, None outside
    length   plain-text characters up to here
    tools    what the model may call after this entry, as chat APIs say it; plain data, no functions
    chosen   for a generated piece, the name of its variable, "" where it has none; None for constant text
    turn     for close: the finished message; `before` is what stood before the turn
    part     for media: its part of a message
    generation  of a generated piece, if it is known
    calls    for calls: what the model called; `value` shows them in plain text
    hidden   for a generated piece, what the model reasoned before it, marks and all, and `reasoning` without
             them; the model sees it in its place while the turn is open, not in plain text
    """

    EMPTY: ClassVar[Transcript]

    prev: Transcript | None = None
    kind: Literal["root", "text", "open", "close", "media", "tools", "calls"] = "root"
    value: str = ""
    role: str | None = None
    length: int = 0
    tools: tuple[dict[str, Any], ...] = ()
    chosen: str | None = None
    turn: Message | None = None
    before: Transcript | None = None
    part: Mapping[str, Any] | None = None
    hidden: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    generation: Generation | None = None

    def offer(self, tools: tuple[dict[str, Any], ...]) -> Transcript:
        """With other tools to call, in place of those before."""
        return Transcript(self, "tools", "", self.role, self.length, tools)

    def call(self, calls: tuple[ToolCall, ...]) -> Transcript:
        """With tools called, in the turn that is open."""
        shown = "\n".join(f"{call.name}({call.arguments})" for call in calls)
        if self.kind != "open" and self.plain.strip():
            shown = f"\n{shown}"
        length = self.length + len(shown)
        return Transcript(self, "calls", shown, self.role, length, self.tools, calls=calls)

    def show(self, part: Mapping[str, Any]) -> Transcript:
        """With media added."""
        mark = f"<{part['type'].removesuffix('_url')}>"
        return Transcript(
            self, "media", mark, self.role, self.length + len(mark), part=part, tools=self.tools
        )

    def say(
        self,
        text: str,
        *,
        chosen: str | None = None,
        hidden: str = "",
        reasoning: str = "",
        generation: Generation | None = None,
    ) -> Transcript:
        """With `text` added, verbatim."""
        if not text and chosen is None:
            return self
        length = self.length + len(text)
        # By place, which is a third quicker.
        return Transcript(
            self, "text", text, self.role, length, self.tools, chosen, None, None, None, hidden, reasoning,
            (), generation,
        )  # fmt: skip

    def open(self, role: str) -> Transcript:
        """With a turn of `role` begun. Raises ValueError inside another turn."""
        if self.role is not None:
            raise ValueError(
                f"a turn of {role!r} cannot start inside a turn of {self.role!r}; end that turn first"
            )
        return Transcript(self, "open", role, role, self.length + len(opening(role)), self.tools)

    def close(self) -> Transcript:
        """With the open turn ended. Raises ValueError where none is open."""
        if self.role is None:
            raise ValueError("no turn is open")
        first = self.prev
        if self.kind == "text" and not self.reasoning and first is not None and first.kind == "open":
            # One piece of text, as most turns are.
            begin, turn = first, Message(self.role, self.value)
        else:
            begin, entries = self._open_turn()
            reasoning = "\n\n".join(entry.reasoning for entry in entries if entry.reasoning)
            turn = Message(
                role=self.role,
                content=content_of(entries),
                reasoning_content=reasoning or None,
                tool_calls=tuple(call for entry in entries for call in entry.calls),
            )
        if self.role == "tool" and begin.prev is not None:
            turn = msgspec.structs.replace(turn, tool_call_id=begin.prev.awaited())
        length = self.length + len(CLOSING)
        return Transcript(self, "close", self.role, None, length, self.tools, None, turn, begin.prev)

    def awaited(self) -> str | None:
        """The id of the first call that no tool's turn has answered yet."""
        answers, at = 0, self
        while at.kind in ("close", "tools") and at.prev is not None:
            turn = at.turn
            if turn is not None and turn.role == "tool":
                answers += 1
            elif turn is not None:
                return turn.tool_calls[answers].id if answers < len(turn.tool_calls) else None
            at = at.prev if at.before is None else at.before
        return None

    def _open_turn(self) -> tuple[Transcript, list[Transcript]]:
        """The entry that opened the turn, and those since."""
        entries: list[Transcript] = []
        at = self
        while at.kind != "open":
            entries.append(at)
            assert at.prev is not None
            at = at.prev
        entries.reverse()
        return at, entries

    def entries(self, since: Transcript | None = None) -> list[Transcript]:
        """The entries after `since` (default: all), oldest first."""
        entries: list[Transcript] = []
        at: Transcript | None = self
        while at is not None and at is not since and at.kind != "root":
            entries.append(at)
            at = at.prev
        entries.reverse()
        return entries

    def text(self, since: Transcript | None = None) -> str:
        """Plain text of the entries after `since` (default: all)."""
        return "".join(entry.plain for entry in self.entries(since))

    @property
    def plain(self) -> str:
        """Plain text of this one entry."""
        match self.kind:
            case "text" | "media" | "calls":
                return self.value
            case "open":
                return opening(self.value)
            case "close":
                return CLOSING
            case _:
                return ""

    def replay(self, onto: Transcript, since: Transcript | None = None) -> Transcript:
        """`onto` with the entries after `since` added. Raises ValueError where turns would nest."""
        return onto.extended(self.entries(since))

    def extended(self, entries: Iterable[Transcript]) -> Transcript:
        """With `entries` added, oldest first, whatever each of them stood behind. Raises ValueError where
        turns would nest."""
        onto = self
        for entry in entries:
            match entry.kind:
                case "open":
                    onto = onto.open(entry.value)
                case "close":
                    onto = onto.close()
                case "media":
                    assert entry.part is not None
                    onto = onto.show(entry.part)
                case "tools":
                    onto = onto.offer(entry.tools)
                case "calls":
                    onto = onto.call(entry.calls)
                case _:
                    onto = onto.say(
                        entry.value,
                        chosen=entry.chosen,
                        hidden=entry.hidden,
                        reasoning=entry.reasoning,
                        generation=entry.generation,
                    )
        return onto

    def messages(self) -> tuple[Message, ...]:
        """Turns in order, text outside turns as role "raw"; a turn still open is last and marked open."""
        turns: list[Message] = []  # the last one first
        at: Transcript | None = self
        if self.role is not None:
            begin, entries = self._open_turn()
            calls = tuple(call for entry in entries for call in entry.calls)
            content = content_of(entries, thinking=True)
            turns.append(Message(role=self.role, content=content, open=True, tool_calls=calls))
            at = begin.prev
        raw: list[Transcript] = []
        while at is not None:
            kind = at.kind
            if kind == "text" or kind == "media":
                raw.append(at)
                at = at.prev
                continue
            if raw:
                if content := content_of(reversed(raw), thinking=True):
                    turns.append(Message(role=RAW_ROLE, content=content))
                raw = []
            if kind == "close":
                assert at.turn is not None
                turns.append(at.turn)
                at = at.before
            else:
                at = at.prev
        turns.reverse()
        return tuple(turns)

    def turns(self) -> list[dict[str, Any]]:
        """messages() as {"role", "content"}, without the text outside turns; a turn that calls tools has
        "tool_calls", the turns that answer them have "tool_call_id", as chat APIs take both."""
        return [_turn(m) for m in self.messages() if m.role != RAW_ROLE]

    def prompt(self) -> Prompt:
        """What a generation that continues here is given. Its last message is open: outside turns that is raw
        text, empty where a turn has just ended, so that nothing is put between."""
        if self.kind == "open":
            # A turn that has just begun, behind whole turns, as most are.
            turns, at = [Message(self.value, "", True)], self.prev
            while at is not None and (at.turn is not None or at.kind == "tools"):
                if at.turn is not None:
                    turns.append(at.turn)
                at = at.prev if at.turn is None else at.before
            if at is None or at.kind == "root":
                turns.reverse()
                return Prompt(tuple(turns), self.tools)
        messages = self.messages()
        last = messages[-1] if messages else None
        if last is None or (last.role != RAW_ROLE and not last.open):
            return Prompt((*messages, Message(role=RAW_ROLE, open=True)), self.tools)
        if last.open:
            return Prompt(messages, self.tools)
        return Prompt((*messages[:-1], Message(role=last.role, content=last.content, open=True)), self.tools)


def _turn(message: Message) -> dict[str, Any]:
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    return turn


def content_of(entries: Iterable[Transcript], *, thinking: bool = False) -> Content:
    """A message's content: text, or its parts in order where there are media. `thinking`: with the model's
    reasoning, in its place."""
    parts: list[dict[str, Any]] = []
    text: list[str] = []
    for entry in entries:
        if entry.calls:
            continue
        if entry.part is None:
            text.append(entry.hidden + entry.value if thinking else entry.value)
            continue
        if joined := "".join(text):
            parts.append({"type": "text", "text": joined})
        parts.append(dict(entry.part))
        text = []
    joined = "".join(text)
    if not parts:
        return joined
    return [*parts, {"type": "text", "text": joined}] if joined else parts


Transcript.EMPTY = Transcript()
CLOSING = "\n"


@functools.lru_cache(maxsize=64)
def opening(role: str) -> str:
    """How plain text begins a turn."""
    return f"{role.upper()}: "
