"""ECMA-262 regular expressions, the language of `pattern`: spelled for Python's `re` and for Rust's crates,
and searched in bounded time.

Read as with the `u` flag, but leniently: an escaped character that needs no escape stands for itself.
Mistakes and what has no exact spelling are reported with their position.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import regex  # type: ignore[import-untyped]

from runtime.grammar.automata.charset import SURROGATES, Ranges, complement, difference, matching, union
from runtime.grammar.automata.regex_syntax import NOTHING, char_class, python_point, rust_point
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

_DIGIT: Ranges = ((48, 57),)
_WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
_SPACE: Ranges = (
    (9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F),
    (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_CLASSES = {
    "d": _DIGIT, "D": complement(_DIGIT), "w": _WORD, "W": complement(_WORD), "s": _SPACE,
    "S": complement(_SPACE),
}  # fmt: skip
UNSPELLED: Ranges = ((0, 7), (11, 11), (14, 31), (127, 127))
"""Characters that JSON strings here cannot contain: they have no escape of one letter."""

_UNSPELLED = re.compile("[" + "".join(f"\\x{first:02x}-\\x{last:02x}" for first, last in UNSPELLED) + "]")
_LINE_ENDS: Ranges = ((10, 10), (13, 13), (0x2028, 0x2029))
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_MAX_PATTERN = 20_000
_REPEAT = re.compile(r"\{(\d+)(?:(,)(\d*))?\}")
_HEX = {"x": re.compile(r"[0-9a-fA-F]{2}"), "u": re.compile(r"[0-9a-fA-F]{4}")}
_BRACED = re.compile(r"\{([0-9a-fA-F]+)\}")
_NAME = re.compile(r"\(\?<([A-Za-z_$][\w$]*)>")
_NAMED = re.compile(r"\\k<([A-Za-z_$][\w$]*)>")
_PROPERTY = re.compile(r"\{(?:(?:gc|sc|scx|General_Category|Script|Script_Extensions)=)?([A-Za-z_]+)\}")


@dataclass(frozen=True, slots=True)
class Spelled:
    """Two spellings. `rust` leaves out UNSPELLED characters; None if a feature is lacking, see `why`."""

    python: str
    rust: str | None
    why: str = ""


@lru_cache(maxsize=512)
def spell(pattern: str) -> Spelled:
    """Both spellings of `pattern`. Raises BadConstraint or UnsupportedConstraint, without `where`."""
    if len(pattern) > _MAX_PATTERN:
        raise BadConstraint(f"has {len(pattern)} characters; at most {_MAX_PATTERN} are taken")
    spelled = _Speller(pattern).run()
    try:
        _compile(spelled.python)
    except (re.error, regex.error, RecursionError, OverflowError) as error:
        raise BadConstraint(f"is not a regular expression: {error}, in {pattern[:80]!r}") from None
    return spelled


def _compile(python: str) -> None:
    try:
        re.compile(python)
    except re.error as error:
        if "look-behind requires" not in str(error):  # of any width in ECMA
            raise
        regex.compile(python)


class _Speller:
    """One walk over the pattern, left to right."""

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        self._at = 0
        self._python: list[str] = []
        self._rust: list[str] = []
        self._why = ""
        self._open: list[bool] = []  # groups, and whether each is a look-behind

    def run(self) -> Spelled:
        while self._at < len(self._text):
            self._step()
        python, rust = "".join(self._python), "".join(self._rust)
        return Spelled(python, None, self._why) if self._why else Spelled(python, rust)

    def _put(self, python: str, rust: str | None = None) -> None:
        self._python.append(python)
        self._rust.append(python if rust is None else rust)

    def _step(self) -> None:
        char = self._text[self._at]
        match char:
            case "\\":
                self._escape()
            case "[":
                self._class()
            case ".":
                self._chars(complement(_LINE_ENDS))
                self._at += 1
            case "(":
                self._group()
            case "$":
                self._put(r"\Z", "$")
                self._at += 1
            case "{":
                self._brace()
            case ")":
                self._close()
            case "^" | "|" | "*" | "+" | "?":
                self._put(char)
                self._at += 1
            case _:
                self._literal(ord(char))
                self._at += 1

    def _literal(self, value: int) -> None:
        narrow = difference(_one(value), UNSPELLED)
        self._put(python_point(value), _class_of(narrow, _rust_point))

    def _chars(self, ranges: Ranges) -> None:
        narrow = difference(ranges, UNSPELLED)
        self._put(_class_of(ranges, python_point), _class_of(narrow, _rust_point))

    def _brace(self) -> None:
        count = _REPEAT.match(self._text, self._at)
        if count is None:
            self._literal(ord("{"))
            self._at += 1
            return
        self._put(count[0])
        self._at = count.end()

    def _close(self) -> None:
        behind = self._open.pop() if self._open else False
        self._put(")")
        self._at += 1
        if behind and (
            self._text[self._at : self._at + 1] in ("*", "+", "?") or _REPEAT.match(self._text, self._at)
        ):
            raise self._mistake("a repeated look-behind")

    def _group(self) -> None:
        rest = self._text[self._at : self._at + 4]
        if rest != "(?i)" or self._at:
            self._open.append(rest.startswith(("(?<=", "(?<!")))
        if rest.startswith(("(?=", "(?!")):
            self._take(rest[:3], "look-ahead")
        elif rest.startswith(("(?<=", "(?<!")):
            self._take(rest[:4], "look-behind")
        elif rest.startswith("(?:"):
            self._take("(?:")
        elif rest.startswith("(?<"):
            name = _NAME.match(self._text, self._at)
            if name is None:
                raise self._mistake("a malformed group name")
            self._put(f"(?P<{name[1].replace('$', '_')}>", "(?:")
            self._at = name.end()
        elif rest.startswith("(?i)") and self._at == 0:
            self._take("(?i)")  # not ECMA; common in schemas
        elif rest.startswith("(?"):
            raise self._mistake("an unknown kind of group")
        else:
            self._put("(", "(?:")
            self._at += 1

    def _take(self, text: str, lost: str = "") -> None:
        self._put(text)
        self._at += len(text)
        self._why = self._why or lost

    def _escape(self) -> None:
        char = self._text[self._at + 1 : self._at + 2]
        if not char:
            raise self._mistake("a backslash at the end")
        if char in "bB":
            # ASCII words on both sides, as in ECMA
            self._put(f"(?a:\\{char})")
            self._at += 2
            self._why = self._why or "a word boundary"
        elif char in "123456789":
            digits = re.compile(r"[1-9]\d*").match(self._text, self._at + 1)
            assert digits is not None
            self._put("\\" + digits[0])
            self._at = digits.end()
            self._why = self._why or "a back reference"
        elif char == "k" and (named := _NAMED.match(self._text, self._at)):
            self._put(f"(?P={named[1].replace('$', '_')})")
            self._at = named.end()
            self._why = self._why or "a back reference"
        elif char in "AZz":  # not ECMA; anchors of other languages, meant as such
            self._put("\\A" if char == "A" else "\\Z", "^" if char == "A" else "$")
            self._at += 2
        else:
            chars = self._escaped()
            if isinstance(chars, int):
                self._literal(chars)
            else:
                self._chars(chars)

    def _escaped(self) -> int | Ranges:
        """The character or class of the escape here; moves past it."""
        char = self._text[self._at + 1 : self._at + 2]
        start = self._at
        self._at += 2
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in "pP":
            name = _PROPERTY.match(self._text, self._at)
            if name is None:
                raise self._mistake("a malformed \\p{...}", start)
            self._at = name.end()
            ranges = _property(name[1])
            return complement(ranges) if char == "P" else ranges
        if char == "u" and (braced := _BRACED.match(self._text, self._at)):
            self._at = braced.end()
            return min(int(braced[1], 16), 0x10FFFF)
        if char in _HEX and (digits := _HEX[char].match(self._text, self._at)):
            self._at = digits.end()
            return self._surrogates(int(digits[0], 16))
        if char == "c" and self._text[self._at : self._at + 1].isalpha():
            self._at += 1
            return ord(self._text[self._at - 1]) % 32
        if not char or (char.isascii() and char.isalnum()):
            raise self._mistake(f"an unknown escape \\{char}", start)
        return ord(char)

    def _surrogates(self, value: int) -> int:
        low = re.compile(r"\\u([dD][c-fC-F][0-9a-fA-F]{2})").match(self._text, self._at)
        if 0xD800 <= value < 0xDC00 and low:
            self._at = low.end()
            return 0x10000 + ((value - 0xD800) << 10) + int(low[1], 16) - 0xDC00
        return value

    def _class(self) -> None:
        start = self._at
        self._at += 1
        negated = self._text.startswith("^", self._at)
        self._at += negated
        parts: list[Ranges] = []
        while not self._text.startswith("]", self._at):
            first = self._member(start)
            if self._text.startswith("-", self._at) and self._text[self._at + 1 : self._at + 2] not in (
                "]",
                "",
            ):
                self._at += 1
                last = self._member(start)
                if isinstance(first, int) and isinstance(last, int):
                    if last < first:
                        raise self._mistake("a range that runs backwards", start)
                    parts.append(((first, last),))
                    continue
                parts += [_one(ord("-")), _one(last)]
            parts.append(_one(first))
        self._at += 1
        ranges = union(*parts)
        self._chars(complement(ranges) if negated else ranges)

    def _member(self, start: int) -> int | Ranges:
        char = self._text[self._at : self._at + 1]
        if not char:
            raise self._mistake("a class that is not closed", start)
        if char != "\\":
            self._at += 1
            return ord(char)
        if self._text.startswith("\\b", self._at):
            self._at += 2
            return 8
        if self._text.startswith("\\B", self._at) or self._at + 1 == len(self._text):
            raise self._mistake("an escape that has no meaning in a class", start)
        return self._escaped()

    def _mistake(self, what: str, at: int | None = None) -> BadConstraint:
        position = self._at if at is None else at
        return BadConstraint(f"has {what} at position {position} of {self._text[:80]!r}")


def spellable(text: str) -> bool:
    """Whether a JSON string here can contain `text`."""
    return _UNSPELLED.search(text) is None


def _one(member: int | Ranges) -> Ranges:
    return ((member, member),) if isinstance(member, int) else member


def _rust_point(value: int) -> str:
    return NOTHING if 0xD800 <= value <= 0xDFFF else rust_point(value)  # no text has surrogates


def _class_of(ranges: Ranges, point: Callable[[int], str]) -> str:
    kept = difference(ranges, SURROGATES)
    if len(kept) == 1 and kept[0][0] == kept[0][1]:
        return point(kept[0][0])
    return char_class(kept, point) if kept else NOTHING


@lru_cache(maxsize=64)
def _property(name: str) -> Ranges:
    try:
        return matching(regex.compile(rf"\p{{{name}}}+"))
    except regex.error:
        text = f"asks for the Unicode property {name!r}, which is not known here"
        raise UnsupportedConstraint(text) from None


# -- searching in bounded time

_SECONDS = (0.05, 0.5)
"""CPU time of all threads: a second, longer try distinguishes a slow pattern from a busy process."""
_SHORT = 64
_FLAT = 4
_REPEATED_GROUP = re.compile(r"\)[*+{?]")
_QUANTIFIER = re.compile(r"[*+{]")


@lru_cache(maxsize=1024)
def _searcher(pattern: str) -> Callable[[str], bool]:
    """Whether the pattern matches somewhere in a text. Nested repeats, which may take exponential time, go to
    an engine that can be stopped; a pattern that was stopped is not tried again."""
    python = spell(pattern).python
    stoppable: Any = regex.compile(python)
    plain = _REPEATED_GROUP.search(python) is None and len(_QUANTIFIER.findall(python)) <= _FLAT
    fast = re.compile(python) if plain and "(?<" not in python else None
    timeouts = list(_SECONDS)

    def matches(text: str) -> bool:
        if fast is not None and len(text) <= _SHORT:
            return fast.search(text) is not None
        for seconds in tuple(timeouts):
            with contextlib.suppress(TimeoutError):
                return stoppable.search(text, timeout=seconds) is not None
        timeouts.clear()
        raise BadConstraint(f"the pattern {pattern[:80]!r} takes too long to search a text for")

    return matches


def matches_pattern(pattern: str, text: str) -> bool:
    """Whether an ECMA pattern matches in `text`. Raises BadConstraint if slow, or as spell() does."""
    return _searcher(pattern)(text)
