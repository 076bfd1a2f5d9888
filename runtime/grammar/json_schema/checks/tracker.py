"""JsonTracker: follows the bytes of a JSON text, knows which values are open, and has each checked as it
closes.

The text is known to be well-formed: a grammar keeps it so. Names that an object has already are refused,
since no schema says what they would mean. It knows no tokens and no grammar.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

from runtime.grammar.json_schema.checks.runtime_checks import Obligation
from runtime.grammar.json_schema.shapes import canonical

VALUE, KEY, STRING, NAME, SCALAR, AFTER, COLON, DONE = range(8)
"""What comes next: a value (or the end of an array), a name (or the end of an object), more of a string, of a
name, of a number or word, a comma or an end, a colon, nothing."""

_SPACE = b" \t\r\n"
_STRING_END = re.compile(rb'["\\]')
_SCALAR_END = re.compile(rb"[,\]} \t\r\n]")


class Frame(NamedTuple):
    """An open object or array. `names`: of the properties it has, or what its items are if they must differ;
    the `number` of the item under way."""

    is_object: bool
    start: int
    obligation: Obligation
    names: frozenset[str]
    number: int
    outer: Frame | None


class Place(NamedTuple):
    """A place in a text. `start` of the string, name or scalar under way, `obligation` of the value there."""

    length: int
    mode: int
    start: int
    escaped: bool
    obligation: Obligation
    frame: Frame | None


class JsonTracker:
    """The text so far and the place in it. `fault` says why the last feed() was refused."""

    def __init__(self, obligation: Obligation) -> None:
        self._text = bytearray()
        self.place = Place(0, VALUE, 0, False, obligation, None)
        self.fault = ""
        self._known: dict[tuple[int, bytes], str | None] = {}

    def copy(self) -> JsonTracker:
        twin = JsonTracker(self.place.obligation)
        twin._text, twin.place = bytearray(self._text), self.place
        return twin

    def restore(self, place: Place) -> None:
        """Back to an earlier place of this text."""
        del self._text[place.length :]
        self.place = place

    def feed(self, data: bytes) -> bool:
        """Follow `data`. False, and no change, where a value closes that its schema refuses."""
        before = self.place
        self._text += data
        place, end = before, before.length + len(data)
        while place.length < end:
            after = self._step(place, end)
            if after is None:
                self.restore(before)
                return False
            place = after
        self.place = place
        return True

    def allows(self, data: bytes) -> bool:
        """What feed(data) would say."""
        before = self.place
        taken = self.feed(data)
        self.restore(before)
        return taken

    def closes(self, place: Place, text: str) -> bool:
        """Whether the string or name under way at `place` may end as `text`."""
        frame, obligation = place.frame, place.obligation
        if place.mode == NAME:
            assert frame is not None, "a name is inside of an object"
            if text in frame.names:
                return False
            return frame.obligation.name_fault(text) is None and not frame.obligation.member(text).impossible
        if obligation.places and obligation.string_fault(text) is not None:
            return False
        if frame is None or frame.is_object or not frame.obligation.unique:
            return True
        return json.dumps(text) not in frame.names

    def complete(self) -> bool:
        """Whether the text is a whole document that its schema takes."""
        place = self.place
        if place.mode == DONE:
            return True
        if place.mode != SCALAR or place.frame is not None:
            return False
        return self._owes(place.obligation, place.start, place.length) is None

    def unsure(self) -> int:
        """Where in the text the first value or name begins that is open and may still be refused; what comes
        before it never will be. The end of the text where there is none.

        An object may refuse a name that it has already, so one that is begun is unsure from the end of the
        member before it: an end could come there instead, or else another name."""
        place = self.place
        first = place.length
        open_value = place.mode in (STRING, SCALAR)
        if open_value and place.obligation.strict:
            first = place.start
        if place.mode in (NAME, KEY) and place.frame is not None and place.frame.names:
            begun = place.start if place.mode == NAME else place.length
            first = max(self._text.rfind(b",", 0, begun), 0)
        frame = place.frame
        while frame is not None:
            if frame.obligation.strict or frame.obligation.unique or frame.obligation.minds_names:
                first = min(first, frame.start)
            frame = frame.outer
        return first

    def since(self, start: int) -> bytes:
        """The text from byte `start` on."""
        return bytes(self._text[start:])

    def text(self) -> bytes:
        return bytes(self._text)

    def _step(self, place: Place, end: int) -> Place | None:
        """The place after one more byte, or a run of them; None where it is refused."""
        at, mode = place.length, place.mode
        if mode in (STRING, NAME):
            return self._in_string(place, end)
        if mode == SCALAR:
            found = _SCALAR_END.search(self._text, at, end)
            if found is None:
                return place._replace(length=end)
            return self._close(place._replace(length=found.start()), place.start)
        byte = self._text[at]
        if byte in _SPACE:
            return place._replace(length=at + 1)
        if mode in (VALUE, KEY) and byte in b"]}":  # an empty array or object
            return self._close_frame(place)
        if mode == VALUE:
            return self._open(place, byte)
        if mode == KEY:
            return place._replace(length=at + 1, mode=NAME, start=at, escaped=False)
        if mode == AFTER:
            return self._after(place, byte)
        if mode == COLON:
            return place._replace(length=at + 1, mode=VALUE)
        self.fault = "there is text after the end of the document"
        return None

    def _open(self, place: Place, byte: int) -> Place:
        at, obligation = place.length, place.obligation
        match byte:
            case 0x7B:
                frame = Frame(True, at, obligation, frozenset(), 0, place.frame)
                return Place(at + 1, KEY, at, False, obligation, frame)
            case 0x5B:
                frame = Frame(False, at, obligation, frozenset(), 0, place.frame)
                return Place(at + 1, VALUE, at, False, obligation.item(0), frame)
            case 0x22:
                return place._replace(length=at + 1, mode=STRING, start=at, escaped=False)
            case _:
                return place._replace(length=at + 1, mode=SCALAR, start=at)

    def _in_string(self, place: Place, end: int) -> Place | None:
        at = place.length
        if place.escaped:
            return place._replace(length=at + 1, escaped=False)
        found = _STRING_END.search(self._text, at, end)
        if found is None:
            return place._replace(length=end)
        at = found.end()
        if found[0] == b"\\":
            return place._replace(length=at, escaped=True)
        if place.mode == STRING:
            return self._close(place._replace(length=at), place.start)
        frame = place.frame
        assert frame is not None, "a name is inside of an object"
        name = json.loads(self._text[place.start : at])
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
        return Place(at, COLON, at, False, obligation, frame)

    def _after(self, place: Place, byte: int) -> Place | None:
        if byte != 0x2C:
            return self._close_frame(place)
        frame = place.frame
        assert frame is not None, "a comma is inside of something"
        at = place.length + 1
        if frame.is_object:
            return Place(at, KEY, at, False, frame.obligation, frame)
        frame = frame._replace(number=frame.number + 1)
        return Place(at, VALUE, at, False, frame.obligation.item(frame.number), frame)

    def _close_frame(self, place: Place) -> Place | None:
        frame = place.frame
        assert frame is not None, "an end ends something"
        return self._close(
            Place(place.length + 1, AFTER, 0, False, frame.obligation, frame.outer), frame.start
        )

    def _close(self, place: Place, start: int) -> Place | None:
        """The value from `start` ends here."""
        fault = self._owes(place.obligation, start, place.length)
        if fault is not None:
            self.fault = fault
            return None
        frame = place.frame
        if frame is None:
            return place._replace(mode=DONE)
        if not frame.is_object and frame.obligation.unique:
            item = canonical(json.loads(self._text[start : place.length]))
            if item in frame.names:
                self.fault = f"{frame.obligation.unique_at}: the item is in the array already"
                return None
            frame = frame._replace(names=frame.names | {item})
            return place._replace(mode=AFTER, frame=frame)
        return place._replace(mode=AFTER)

    def _owes(self, obligation: Obligation, start: int, end: int) -> str | None:
        if not obligation.places:
            return None
        text = bytes(self._text[start:end])
        key = (id(obligation), text)
        if key not in self._known:
            if len(self._known) >= 64:
                self._known.clear()
            self._known[key] = obligation.fault(text.decode("utf-8", "replace"))
        return self._known[key]
