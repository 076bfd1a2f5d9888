"""JsonTracker: follows the bytes of a well-formed JSON text, knows which values are open, and checks each as
it closes. Repeated names of an object are refused.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from runtime.grammar.json_schema.checks.runtime_checks import Obligation
from runtime.grammar.json_schema.shapes import canonical

VALUE, KEY, STRING, NAME, SCALAR, AFTER, COLON, DONE = range(8)
"""What comes next: a value (or the end of an array), a name (or the end of an object), more of a string, of a
name, of a number or literal, a comma or an end, a colon, nothing."""

_SPACE = b" \t\r\n"
_STRING_END = re.compile(rb'["\\]')
_SCALAR_END = re.compile(rb"[,\]} \t\r\n]")


class Frame(NamedTuple):
    """An open object or array. `names`: of properties, or unique items; `number`: of the current item."""

    is_object: bool
    start: int
    obligation: Obligation
    names: frozenset[str]
    number: int
    outer: Frame | None


class Position(NamedTuple):
    """`start` of the current string, name or scalar; `obligation` of the current value."""

    length: int
    mode: int
    start: int
    escaped: bool
    obligation: Obligation
    frame: Frame | None


class JsonTracker:
    """The text so far and the position in it. `fault` says why the last feed() was refused."""

    def __init__(self, obligation: Obligation) -> None:
        self._text = bytearray()
        self.position = Position(0, VALUE, 0, False, obligation, None)
        self.fault = ""
        self._known: dict[tuple[int, bytes], str | None] = {}

    def copy(self) -> JsonTracker:
        twin = JsonTracker(self.position.obligation)
        twin._text, twin.position = bytearray(self._text), self.position
        return twin

    def restore(self, position: Position) -> None:
        """Back to an earlier position of this text."""
        del self._text[position.length :]
        self.position = position

    def feed(self, data: bytes) -> bool:
        """Follow `data`. False, and no change, if a value closes that is invalid."""
        before = self.position
        self._text += data
        position, end = before, before.length + len(data)
        while position.length < end:
            after = self._step(position, end)
            if after is None:
                self.restore(before)
                return False
            position = after
        self.position = position
        return True

    def allows(self, data: bytes) -> bool:
        """What feed(data) would return."""
        before = self.position
        valid = self.feed(data)
        self.restore(before)
        return valid

    def closes(self, position: Position, text: str) -> bool:
        """Whether the current string or name at `position` may end as `text`."""
        frame, obligation = position.frame, position.obligation
        if position.mode == NAME:
            assert frame is not None, "a name is inside of an object"
            if text in frame.names:
                return False
            return frame.obligation.name_fault(text) is None and not frame.obligation.member(text).impossible
        if obligation.paths and obligation.string_fault(text) is not None:
            return False
        if frame is None or frame.is_object or not frame.obligation.unique:
            return True
        return json.dumps(text) not in frame.names

    def complete(self) -> bool:
        """Whether the text is a whole document that its schema takes."""
        position = self.position
        if position.mode == DONE:
            return True
        if position.mode != SCALAR or position.frame is not None:
            return False
        return self._owes(position.obligation, position.start, position.length) is None

    def unsure(self) -> int:
        """The start of the first open value or name that may still be refused, else the end of the text. A
        name, which may be a repeated one, is unsure from the end of the member before it."""
        position = self.position
        first = position.length
        open_value = position.mode in (STRING, SCALAR)
        if open_value and position.obligation.strict:
            first = position.start
        if position.mode in (NAME, KEY) and position.frame is not None and position.frame.names:
            begun = position.start if position.mode == NAME else position.length
            first = max(self._text.rfind(b",", 0, begun), 0)
        frame = position.frame
        while frame is not None:
            if frame.obligation.strict or frame.obligation.unique or frame.obligation.restricts_names:
                first = min(first, frame.start)
            frame = frame.outer
        return first

    def since(self, start: int) -> bytes:
        """The text from byte `start` on."""
        return bytes(self._text[start:])

    def _step(self, position: Position, end: int) -> Position | None:
        """The position after one more byte, or a run of them; None if it is refused."""
        at, mode = position.length, position.mode
        if mode in (STRING, NAME):
            return self._in_string(position, end)
        if mode == SCALAR:
            stop = _SCALAR_END.search(self._text, at, end)
            if stop is None:
                return position._replace(length=end)
            return self._close(position._replace(length=stop.start()), position.start)
        byte = self._text[at]
        if byte in _SPACE:
            return position._replace(length=at + 1)
        if mode in (VALUE, KEY) and byte in b"]}":  # an empty array or object
            return self._close_frame(position)
        if mode == VALUE:
            return self._open(position, byte)
        if mode == KEY:
            return position._replace(length=at + 1, mode=NAME, start=at, escaped=False)
        if mode == AFTER:
            return self._after(position, byte)
        if mode == COLON:
            return position._replace(length=at + 1, mode=VALUE)
        self.fault = "there is text after the end of the document"
        return None

    def _open(self, position: Position, byte: int) -> Position:
        at, obligation = position.length, position.obligation
        match byte:
            case 0x7B:
                frame = Frame(True, at, obligation, frozenset(), 0, position.frame)
                return Position(at + 1, KEY, at, False, obligation, frame)
            case 0x5B:
                frame = Frame(False, at, obligation, frozenset(), 0, position.frame)
                return Position(at + 1, VALUE, at, False, obligation.item(0), frame)
            case 0x22:
                return position._replace(length=at + 1, mode=STRING, start=at, escaped=False)
            case _:
                return position._replace(length=at + 1, mode=SCALAR, start=at)

    def _in_string(self, position: Position, end: int) -> Position | None:
        at = position.length
        if position.escaped:
            return position._replace(length=at + 1, escaped=False)
        stop = _STRING_END.search(self._text, at, end)
        if stop is None:
            return position._replace(length=end)
        at = stop.end()
        if stop[0] == b"\\":
            return position._replace(length=at, escaped=True)
        if position.mode == STRING:
            return self._close(position._replace(length=at), position.start)
        frame = position.frame
        assert frame is not None, "a name is inside of an object"
        name = json.loads(self._text[position.start : at])
        fault = (
            f"the name {name!r} is there already"
            if name in frame.names
            else frame.obligation.name_fault(name)
        )
        if fault is not None:
            self.fault = fault
            return None
        frame = frame._replace(names=frame.names | {name})
        obligation = frame.obligation.member(name)
        if obligation.impossible:
            self.fault = f"there may be no property {name!r}"
            return None
        return Position(at, COLON, at, False, obligation, frame)

    def _after(self, position: Position, byte: int) -> Position | None:
        if byte != 0x2C:
            return self._close_frame(position)
        frame = position.frame
        assert frame is not None, "a comma is inside of something"
        at = position.length + 1
        if frame.is_object:
            return Position(at, KEY, at, False, frame.obligation, frame)
        frame = frame._replace(number=frame.number + 1)
        return Position(at, VALUE, at, False, frame.obligation.item(frame.number), frame)

    def _close_frame(self, position: Position) -> Position | None:
        frame = position.frame
        assert frame is not None, "an end ends something"
        return self._close(
            Position(position.length + 1, AFTER, 0, False, frame.obligation, frame.outer), frame.start
        )

    def _close(self, position: Position, start: int) -> Position | None:
        """The value from `start` ends here."""
        fault = self._owes(position.obligation, start, position.length)
        if fault is not None:
            self.fault = fault
            return None
        frame = position.frame
        if frame is None:
            return position._replace(mode=DONE)
        if not frame.is_object and frame.obligation.unique:
            item = canonical(json.loads(self._text[start : position.length]))
            if item in frame.names:
                self.fault = f"{frame.obligation.unique_at}: the item is in the array already"
                return None
            frame = frame._replace(names=frame.names | {item})
            return position._replace(mode=AFTER, frame=frame)
        return position._replace(mode=AFTER)

    def _owes(self, obligation: Obligation, start: int, end: int) -> str | None:
        if not obligation.paths:
            return None
        text = bytes(self._text[start:end])
        key = (id(obligation), text)
        if key not in self._known:
            if len(self._known) >= 64:
                self._known.clear()
            self._known[key] = obligation.fault(text.decode("utf-8", "replace"))
        return self._known[key]
