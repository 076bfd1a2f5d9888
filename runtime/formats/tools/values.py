"""Values as models write them, JSON or nearly so, read as they come and returned as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from runtime.formats.tools.reader import Malformed, Reader, Reading

Emit = Callable[[str], None]

DEEPEST = 200  # maximum nesting

_WORD = re.compile(r"[\w+\-.]*")
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_PYTHON_NUMBER = re.compile(r"[+-]?(?:[0-9][0-9_]*)?(?:\.[0-9_]*)?(?:[eE][+-]?[0-9]+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\\": "\\", '"': '"', "'": "'"}
_SIMPLE_ESCAPES = r"ntrbf/\\\"'"
_POINT = r"u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"  # a whole character, not a surrogate
_SIMPLE = re.compile(rf"\\([{_SIMPLE_ESCAPES}]|{_POINT})")
SIMPLE_STRING = re.compile(r'"[^"\\\x00-\x1f]+"')  # in JSON the same
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,30})(?:\.[0-9]{1,30})?")  # the same
_ITEM = rf"({NUMBER.pattern}|{SIMPLE_STRING.pattern}|true|false|null)\s*,\s*"
_PAIR = rf"{_ITEM}({SIMPLE_STRING.pattern})\s*:\s*"
# In a list, and in an object after a key: many values without escapes, which are read together.
_FLAT = {
    "]": (re.compile(rf"(?:{_ITEM}){{1,2000}}(?=[^\s\]])"), re.compile(_ITEM), r"\1, "),
    "}": (re.compile(f"(?:{_PAIR}){{1,2000}}"), re.compile(_PAIR), r"\1, \2: "),
}
_WHOLE_NUMBER = re.compile(rf"{NUMBER.pattern}(?=[\s,\]}}])")
_KEY = re.compile(rf"\s*({SIMPLE_STRING.pattern})\s*:")
_CLOSERS = {"{": "}", "[": "]", "(": ")"}
_LONGEST_WORD = 400  # maximum digits of a number


@dataclass(frozen=True)
class Dialect:
    """quotes: marks around a string; escaped: whether backslashes are escapes in it. constants: names of
    constants -> JSON. bare_keys: keys of objects need no quotes. python: numbers, tuples, trailing commas and
    escapes as in Python."""

    quotes: tuple[str, ...] = ('"',)
    escaped: bool = True
    constants: Mapping[str, str] = field(
        default_factory=lambda: {"true": "true", "false": "false", "null": "null"}
    )
    bare_keys: bool = False
    python: bool = False

    @cached_property
    def quote_firsts(self) -> frozenset[str]:
        return frozenset(quote[0] for quote in self.quotes)


JSON = Dialect()
_BOTH = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
PYTHON = Dialect(quotes=('"', "'", '"""', "'''"), constants=_BOTH, python=True)


text_of = json.JSONEncoder(ensure_ascii=False).encode
"""Encodes a value as JSON."""


def _inner(text: str) -> str:
    """The text as it is inside a JSON string."""
    return text_of(text)[1:-1]


def value(reader: Reader, dialect: Dialect, emit: Emit) -> Reading[None]:
    """One value, emitted as JSON in pieces, as json.dumps writes it. Raises Malformed."""
    open_brackets: list[str] = []
    while True:
        character = reader.solid() or (yield from reader.next_solid())
        if open_brackets and dialect.escaped and open_brackets[-1] in _FLAT:
            flat, one, written = _FLAT[open_brackets[-1]]
            match = flat.match(reader.text, reader.at)
            if match is not None:
                emit(one.sub(written, reader.take(match.end() - match.start())))
                continue
        quote = (yield from reader.starts(dialect.quotes)) if character in dialect.quote_firsts else ""
        if character in "{[" or (character == "(" and dialect.python):
            reader.take(1)
            if len(open_brackets) == DEEPEST:
                raise Malformed("too deeply nested")
            open_brackets.append(_CLOSERS[character])
            emit("{" if character == "{" else "[")
            if (reader.solid() or (yield from reader.next_solid())) != open_brackets[-1]:
                if character == "{":
                    yield from _key(reader, dialect, emit)
                continue
        elif quote:
            yield from _string(reader, dialect, quote, emit)
        elif (match := _WHOLE_NUMBER.match(reader.text, reader.at)) is not None:
            emit(reader.take(match.end() - match.start()))
        else:
            emit(_constant((yield from reader.run(_WORD)), dialect))
        # A value has ended; its container may end as well.
        while open_brackets:
            character = reader.solid() or (yield from reader.next_solid())
            closer = open_brackets[-1]
            if character == ",":
                reader.take(1)
                if not (dialect.python and (reader.solid() or (yield from reader.next_solid())) == closer):
                    emit(", ")
                    if closer == "}":
                        yield from _key(reader, dialect, emit)
                    break
            elif character != closer:
                raise Malformed(f"{character!r} instead of {closer!r}")
            else:
                reader.take(1)
                open_brackets.pop()
                emit("}" if closer == "}" else "]")
        else:
            return


def _key(reader: Reader, dialect: Dialect, emit: Emit) -> Reading[None]:
    if dialect.escaped and (match := _KEY.match(reader.text, reader.at)) is not None:
        reader.take(match.end() - match.start())
        emit(f"{match[1]}: ")
        return
    yield from reader.blank()
    quote = yield from reader.starts(dialect.quotes)
    if quote:
        yield from _string(reader, dialect, quote, emit)
    elif dialect.bare_keys:
        emit(text_of((yield from reader.until(":,{}[]", limit=_LONGEST_WORD)).strip()))
    else:
        raise Malformed("a key is missing")
    yield from reader.expect(":")
    emit(": ")


def _constant(word: str, dialect: Dialect) -> str:
    if word in dialect.constants:
        return dialect.constants[word]
    if len(word) > _LONGEST_WORD:
        raise Malformed("a long number")
    if _JSON_NUMBER.fullmatch(word):
        return word
    if dialect.python and re.search("[0-9]", word) and _PYTHON_NUMBER.fullmatch(word):
        plain = word.replace("_", "").lstrip("+")
        return text_of(float(plain)) if re.search("[.eE]", plain) else text_of(int(plain))
    raise Malformed(f"{word[:20]!r} is no value")


def _string(reader: Reader, dialect: Dialect, quote: str, emit: Emit) -> Reading[None]:
    simple = SIMPLE_STRING.match(reader.text, reader.at) if dialect.escaped else None
    if simple is not None:
        emit(reader.take(simple.end() - simple.start()))
        return
    reader.take(len(quote))
    emit('"')
    plain = _plain(quote[0], dialect.escaped)
    while True:
        run = yield from _some(reader, plain)
        if run:
            emit(_inner(_SIMPLE.sub(_meant, run) if dialect.escaped else run))
        elif (yield from reader.starts((quote,))):
            reader.take(len(quote))
            emit('"')
            return
        elif (yield from reader.peek()) == "\\" and dialect.escaped:
            reader.take(1)
            emit(_inner((yield from _escape(reader, dialect))))
        else:
            emit(_inner(reader.take(1)))


@lru_cache(maxsize=16)
def _plain(quote: str, escaped: bool) -> re.Pattern[str]:
    """A run of characters of a string, with simple escapes."""
    if not escaped:
        return re.compile(f"[^{re.escape(quote)}]+")
    return re.compile(rf"""(?:[^{re.escape(quote)}\\]++|\\(?:[{_SIMPLE_ESCAPES}]|{_POINT}))++""")


def _meant(escape: re.Match[str]) -> str:
    kind = escape[1]
    return _ESCAPES[kind] if len(kind) == 1 else chr(int(kind[1:], 16))


def _some(reader: Reader, pattern: re.Pattern[str]) -> Reading[str]:
    """The available part of a run; "" if other text is here."""
    if not reader.left:
        yield from reader.peek()
    match = pattern.match(reader.text, reader.at)
    return reader.take(match.end() - reader.at) if match else ""


def _escape(reader: Reader, dialect: Dialect) -> Reading[str]:
    """The meaning of the escape after a backslash."""
    yield from reader.peek()
    kind = reader.take(1)
    if kind in _ESCAPES:
        return _ESCAPES[kind]
    if kind == "u" or (dialect.python and kind in "xU"):
        size = {"u": 4, "x": 2, "U": 8}[kind]
        code = yield from _hex(reader, size)
        if 0xD800 <= code < 0xDC00 and (yield from reader.starts(("\\u",))):
            reader.take(2)
            low = yield from _hex(reader, 4)
            if not 0xDC00 <= low < 0xE000:
                raise Malformed("half a character")
            code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise Malformed("half a character")
        return chr(code)
    if dialect.python:
        return {"\n": "", "a": "\a", "v": "\v", "0": "\0"}.get(kind, "\\" + kind)
    raise Malformed(f"\\{kind} is no escape")


def _hex(reader: Reader, size: int) -> Reading[int]:
    while reader.left < size:
        yield from reader.more()
    digits = reader.take(size)
    if not re.fullmatch("[0-9a-fA-F]*", digits):
        raise Malformed(f"{digits!r} is no number of a character")
    return int(digits, 16)
