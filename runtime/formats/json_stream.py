"""JSON parsed while it is being written: text comes in pieces, split anywhere, and the value so far is
available after each.

Every character is processed once. A value that was shown never changes: a number, `true`, `false` or `null`
appears when it has ended, a name with the beginning of its value, a string character by character without
half an escape or half a surrogate pair. The grammar is RFC 8259's. It knows no schema and no tokens.

jiter's partial mode reads the whole text again for each piece: for a text of 20 kB in pieces of four
characters that takes 84 us a piece, and this 7.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, NamedTuple

MAX_DEPTH: Final = 1000
"""Maximum depth of objects and arrays."""

_HIGH: Final = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
"""The first half of a surrogate pair. It is complete with the second half, or with a text that is none."""
_PLAIN: Final = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPES: Final = re.compile(
    r'(?:\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}'
    rf"|{_HIGH}(?:\\u[dD][c-fC-F][0-9a-fA-F]{{2}}|(?=[^\\]|\\[^u]|\\u(?:[^dD]|[dD][^c-fC-F]))))+"
)
"""Complete escapes."""
_CUT_ESCAPE: Final = re.compile(
    rf"\\(?:u[0-9a-fA-F]{{0,3}})?|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?"
)
_SPACE: Final = re.compile(r"[ \t\n\r]+")
_DIGITS: Final = re.compile(r"[-+.0-9eE]+")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_LITERALS: Final[dict[str, tuple[str, bool | None]]] = {
    "t": ("true", True), "f": ("false", False), "n": ("null", None),
}  # fmt: skip

# What may come next, and what is being read.
_VALUE, _ITEM, _KEY, _NAME, _COLON, _AFTER_ITEM, _AFTER_MEMBER, _DONE = range(8)
_STRING, _IN_NAME, _IN_NUMBER, _IN_WORD = range(8, 12)
_LEAVE, _ENTER_OBJECT, _ENTER_ARRAY = range(12, 15)
_WAIT: Final = -1
"""Returned by a step if the rest of the text is too short to decide."""
_EXPECTED: Final = {
    _VALUE: "a value", _ITEM: "a value or ']'", _KEY: "a name or '}'", _NAME: "a name",
    _COLON: "':'", _AFTER_ITEM: "',' or an end", _AFTER_MEMBER: "',' or an end",
}  # fmt: skip
_INSIDE: Final = {_STRING: "a string", _IN_NAME: "a name", _IN_NUMBER: "a number", _IN_WORD: "a word"}
_BEGINNINGS: Final = {
    '"': _STRING, "{": _ENTER_OBJECT, "[": _ENTER_ARRAY,
    **dict.fromkeys("-0123456789", _IN_NUMBER), **dict.fromkeys(_LITERALS, _IN_WORD),
}  # fmt: skip
_SIGNS: Final[dict[int, dict[str, int]]] = {
    _VALUE: _BEGINNINGS, _ITEM: {**_BEGINNINGS, "]": _LEAVE},
    _KEY: {'"': _IN_NAME, "}": _LEAVE}, _NAME: {'"': _IN_NAME}, _COLON: {":": _VALUE},
    _DONE: {}, _AFTER_ITEM: {",": _VALUE, "]": _LEAVE}, _AFTER_MEMBER: {",": _NAME, "}": _LEAVE},
}  # fmt: skip
"""What may come next -> character -> what it begins or ends."""
_NOTHING: Final = object()


class JsonStreamError(ValueError):
    """The text is not JSON. `offset` counts characters from 0, `line` and `column` from 1."""

    def __init__(self, message: str, offset: int, line: int, column: int) -> None:
        self.offset, self.line, self.column = offset, line, column
        super().__init__(f"{message} at line {line}, column {column} (character {offset})")


class JsonEvent(NamedTuple):
    """News about the value at `path` (names and indices from the root, which is ()).

    complete    the value has ended, and `value` is all of it. Otherwise an object or array has begun (`value`
                is empty), or a string continues (`value` is its new piece; "" if it has just begun)
    """

    path: tuple[str | int, ...]
    value: Any
    complete: bool


class JsonStream:
    """feed() pieces, then close(). `strings`: show strings while they are being written."""

    def __init__(self, *, strings: bool = True) -> None:
        self._strings = strings
        self._mode = _VALUE
        self._root: Any = _NOTHING
        # The open objects and arrays, outermost first, with the name each object is at; the innermost's path.
        self._open: list[dict[str, Any] | list[Any]] = []
        self._names: list[str] = []
        self._path: tuple[str | int, ...] = ()
        # The current string, name or number, and the rest of the text, which continues with the next piece.
        self._parts: list[str] = []
        self._rest = ""
        self._emitted = 0
        self._begun = False
        self._events: list[JsonEvent] = []
        self._offset, self._lines, self._line_start = 0, 0, 0
        self._error: JsonStreamError | None = None
        # By mode.
        self._steps = (*[self._sign] * _STRING, self._string, self._string, self._number, self._literal)

    # -- reading ---------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether the document has ended. A lone number ends with close()."""
        return self._mode == _DONE

    @property
    def started(self) -> bool:
        """Whether there is a value to show."""
        return self._root is not _NOTHING or bool(self._open) or self._shown_string()

    @property
    def value(self) -> Any:
        """The value so far; None if nothing has `started`. Finished parts are shared between the values of
        different moments, open parts are copied: do not change it."""
        if self._root is not _NOTHING:
            return self._root
        shown: Any = self._string_so_far() if self._shown_string() else _NOTHING
        for inside, name in zip(reversed(self._open), reversed(self._names), strict=True):
            if isinstance(inside, dict):
                shown = {**inside} if shown is _NOTHING else {**inside, name: shown}
            else:
                shown = [*inside] if shown is _NOTHING else [*inside, shown]
        return None if shown is _NOTHING else shown

    @property
    def writing(self) -> tuple[str | int, ...] | None:
        """The path in `value` of the part being written: a shown string, else the innermost open object or
        array. None if the value has ended, or not `started`."""
        if self._root is not _NOTHING or not self.started:
            return None
        return self._value_path() if self._shown_string() else self._path

    def feed(self, text: str) -> list[JsonEvent]:
        """Continue reading; returns the new events. Raises JsonStreamError with the position of invalid
        JSON."""
        if self._error is not None:
            raise self._error
        text, self._rest = self._rest + text, ""
        steps, at, end = self._steps, 0, len(text)
        try:
            while at < end:
                if self._mode not in _INSIDE and (space := _SPACE.match(text, at)) is not None:
                    at = space.end()
                    continue
                if (after := steps[self._mode](text, at)) == _WAIT:
                    self._rest = text[at:]
                    break
                at = after
        except _Wrong as wrong:
            raise self._fail(wrong.what, text, wrong.at) from None
        self._count(text, at)
        self._tell_string()
        events, self._events = self._events, []
        return events

    def close(self) -> list[JsonEvent]:
        """End of the text. Raises JsonStreamError if it ends too early."""
        if self._error is not None:
            raise self._error
        if self._mode == _IN_NUMBER:
            try:
                self._end_number(0)
            except _Wrong as wrong:
                raise self._fail(wrong.what, "", 0) from None
        if self._mode != _DONE:
            inside = _INSIDE.get(self._mode)
            ending = f"inside {inside}" if inside else f"where {_EXPECTED[self._mode]} should be"
            raise self._fail(f"the text ends {ending}", "", 0)
        events, self._events = self._events, []
        return events

    # -- steps: each reads from `at` and returns where it stopped --------------------------------------------

    def _sign(self, text: str, at: int) -> int:
        """A character that begins, separates or ends values."""
        following = _SIGNS[self._mode].get(text[at])
        if following is None:
            expected = _EXPECTED.get(self._mode)
            wrong = f"{text[at]!r} stands where {expected} should be"
            raise _Wrong(wrong if expected else "there is text after the end", at)
        if following < _LEAVE:
            self._mode = following
            self._begun = following == _STRING
            return at if following >= _IN_NUMBER else at + 1
        if following == _LEAVE:
            self._leave()
        else:
            self._enter({} if following == _ENTER_OBJECT else [], at)
        return at + 1

    def _string(self, text: str, at: int) -> int:
        if (plain := _PLAIN.match(text, at)) is not None:
            self._parts.append(plain[0])
            return plain.end()
        if (escapes := _ESCAPES.match(text, at)) is not None:
            self._parts.append(_unescaped(escapes[0]))
            return escapes.end()
        if text[at] == '"':
            self._end_string()
            return at + 1
        if text[at] != "\\":
            raise _Wrong(f"the control character {text[at]!r} must be escaped in a string", at)
        if _CUT_ESCAPE.fullmatch(text, at):
            return _WAIT
        raise _Wrong(f"{text[at : at + 6]!r} is no escape", at)

    def _end_string(self) -> None:
        string = "".join(self._parts)
        self._parts, self._emitted, self._begun = [], 0, False
        if self._mode == _STRING:
            self._put(string)
        else:
            self._names[-1] = string
            self._mode = _COLON

    def _number(self, text: str, at: int) -> int:
        match = _DIGITS.match(text, at)
        if match is not None:
            self._parts.append(match[0])
            return match.end()
        self._end_number(at)
        return at

    def _end_number(self, at: int) -> None:
        text, self._parts = "".join(self._parts), []
        match = _NUMBER.fullmatch(text)
        if match is None:
            raise _Wrong(f"{text[:80]!r} is no number", at)
        try:
            self._put(float(text) if match[1] or match[2] else int(text))
        except ValueError as error:
            raise _Wrong(f"the number {text[:20]}... cannot be held: {error}", at) from None

    def _literal(self, text: str, at: int) -> int:
        word, value = _LITERALS[text[at]]
        piece = text[at : at + len(word)]
        if not word.startswith(piece):
            raise _Wrong(f"{piece!r} is no JSON", at)
        if piece != word:
            return _WAIT
        self._put(value)
        return at + len(word)

    # -- within ----------------------------------------------------------------------------------------------

    def _value_path(self) -> tuple[str | int, ...]:
        """The path of the value that is being written."""
        if not self._open:
            return ()
        inside = self._open[-1]
        return (*self._path, self._names[-1] if isinstance(inside, dict) else len(inside))

    def _enter(self, inside: dict[str, Any] | list[Any], at: int) -> None:
        if len(self._open) >= MAX_DEPTH:
            raise _Wrong(f"there are more than {MAX_DEPTH} levels", at)
        self._path = self._value_path()
        self._open.append(inside)
        self._names.append("")
        is_object = isinstance(inside, dict)
        self._events.append(JsonEvent(self._path, {} if is_object else [], False))
        self._mode = _KEY if is_object else _ITEM

    def _leave(self) -> None:
        inside, path = self._open.pop(), self._path
        self._names.pop()
        self._path = path[:-1] if path else ()
        self._put(inside)

    def _put(self, value: Any) -> None:
        """A value has ended."""
        self._events.append(JsonEvent(self._value_path(), value, True))
        if not self._open:
            self._root, self._mode = value, _DONE
            return
        inside = self._open[-1]
        if isinstance(inside, dict):
            inside[self._names[-1]] = value
        else:
            inside.append(value)
        self._mode = _AFTER_MEMBER if isinstance(inside, dict) else _AFTER_ITEM

    def _shown_string(self) -> bool:
        return self._strings and self._mode == _STRING

    def _string_so_far(self) -> str:
        """Joined into one part, so that repeated calls do not join the same parts again."""
        if len(self._parts) != 1:
            self._parts, self._emitted = ["".join(self._parts)], 1
        return self._parts[0]

    def _tell_string(self) -> None:
        """Add an event for a string that continues."""
        if self._shown_string() and (self._begun or len(self._parts) > self._emitted):
            piece = "".join(self._parts[self._emitted :])
            self._events.append(JsonEvent(self._value_path(), piece, False))
            self._emitted, self._begun = len(self._parts), False

    def _count(self, text: str, end: int) -> None:
        lines = text.count("\n", 0, end)
        if lines:
            self._lines += lines
            self._line_start = self._offset + text.rindex("\n", 0, end) + 1
        self._offset += end

    def _fail(self, what: str, text: str, at: int) -> JsonStreamError:
        self._count(text, at)
        column = self._offset - self._line_start + 1
        self._error = JsonStreamError(what, self._offset, self._lines + 1, column)
        return self._error


class _Wrong(Exception):
    def __init__(self, what: str, at: int) -> None:
        self.what, self.at = what, at


def _unescaped(escapes: str) -> str:
    """Their characters. Half of a surrogate pair is none."""
    text: str = json.loads(f'"{escapes}"')
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
