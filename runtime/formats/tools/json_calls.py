"""Formats whose calls are JSON objects with a name and arguments, alone or in a list."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from runtime.formats.tools.base import CallSink, WrittenCalls
from runtime.formats.tools.reader import Malformed, Reader, Reading
from runtime.formats.tools.types import Call, StructureInfo
from runtime.formats.tools.values import JSON, SIMPLE_STRING, Dialect, Emit, text_of, value

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")
_OTHERS = ("id", "type", "tool_call_id", "index", "thought")
_KEYS = sorted({key[:2] for key in (*_NAMES, *_ARGUMENTS, *_OTHERS)})
_FIRST = "".join(sorted({key[0] for key in _KEYS}))
# For a bracket without other marks: patterns for the beginning of a call, and for a possible beginning.
_BARE = {
    "{": (
        rf"""\{{(?=\s{{0,64}}["'](?:{"|".join(_KEYS)}))""",
        rf"""\{{\s{{0,64}}(?:["'][{_FIRST}]?)?\Z""",
    ),
    "[": (r"\[(?=\s{0,64}\{)", r"\[\s{0,64}\Z"),
}


@dataclass(frozen=True)
class JsonCalls(WrittenCalls):
    """begin, end: around one call, or around all calls if `listed` (written as a list). Both forms are read.
    separator: between calls. aliases: other texts that begin a call. closers: other texts that end a call.

    name, arguments: the keys that are written; all usual ones are read. bare: also read an object or a list
    without `begin`. others: ignore other keys of an object; otherwise it is not a call. older: how structural
    tags of the older form begin an object, with the name in braces; "": there is none.
    """

    begin: str
    end: str = ""
    separator: str = ""
    listed: bool = False
    aliases: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    name: str = "name"
    arguments: str = "arguments"
    bare: str = ""
    dialect: Dialect = JSON
    others: bool = False
    older: str = '{"name":{}, "arguments":'

    @property
    def triggers(self) -> tuple[str, ...]:  # type: ignore[override]
        begin = self.begin.strip().removesuffix("[").strip()
        return tuple(dict.fromkeys(filter(None, (begin, *self.aliases, *self.bare))))

    def finder(self, names: Sequence[str] | None) -> re.Pattern[str] | None:
        if not self.bare:
            return None
        marks = [re.escape(one) for one in self.triggers if one not in self.bare]
        return re.compile("|".join([*marks, _BARE[self.bare][0]]))

    @cached_property
    def unsure(self) -> re.Pattern[str] | None:  # type: ignore[override]
        return re.compile(_BARE[self.bare][1]) if self.bare else None

    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        opener = trigger if trigger and trigger in self.bare else (yield from reader.expect("{", "["))
        ends = tuple(filter(None, (self.end.strip(), *self.closers)))
        if opener == "{":
            yield from call_object(reader, self.dialect, calls, self.others)
            while self.bare and (yield from self._another(reader)):
                yield from call_object(reader, self.dialect, calls, self.others)
        else:
            while True:
                yield from reader.expect("{")
                yield from call_object(reader, self.dialect, calls, self.others)
                if (yield from reader.follows((",", "]"))) != ",":
                    break
            ends = tuple(one.removeprefix("]") for one in ends if one != "]")
        if ends:
            yield from reader.follows(ends)
        reader.reset()

    def _another(self, reader: Reader) -> Reading[bool]:
        """Whether a separator and another object follow; they are consumed, including the object's opening
        brace."""
        separator = self.separator.strip()
        width = yield from reader.width_of_blank()
        if not (yield from reader.starts((separator,), width)):
            return False
        after = width + len(separator)
        after += yield from reader.width_of_blank(after)
        begin = yield from reader.starts((self.begin.strip(), "{"), after)
        if not begin:
            return False
        reader.take(after + len(begin))
        if begin != "{":
            yield from reader.expect("{")
        return True

    def written(self, number: int, call: Call) -> str:
        arguments = text_of(dict(call.arguments))
        text = f'{{"{self.name}": {text_of(call.name)}, "{self.arguments}": {arguments}}}'
        return text if self.listed or self.bare else f"{self.begin}{text}{self.end}"

    @property
    def around(self) -> tuple[str, str, str]:  # type: ignore[override]
        if self.listed:
            return self.begin, ", ", self.end
        return (self.begin, self.separator, self.end) if self.bare else ("", self.separator, "")

    def auto_trigger(self) -> str | None:
        trigger = self.triggers[0]
        return None if trigger in self.bare else trigger

    def structure_info(self, name: str) -> StructureInfo | None:
        if not self.older:
            return None
        head = self.older.replace("{}", text_of(name))
        return StructureInfo(self.begin + head, f"}}{self.end}", self.triggers[0])


def call_object(reader: Reader, dialect: Dialect, calls: CallSink, others: bool = False) -> Reading[None]:
    """A call, after its opening brace. Raises Malformed."""
    name: str | None = None
    begun = False
    held: list[str] | None = None
    while True:
        key = yield from _text(reader, dialect)
        yield from reader.expect(":")
        if key in _NAMES and name is None:
            name = yield from _text(reader, dialect)
            if held is not None:
                calls.begin(name)
                calls.arguments("".join(held))
        elif key in _ARGUMENTS and not begun:
            begun = True
            if name is not None:
                calls.begin(name)
                yield from _arguments(reader, dialect, calls.arguments)
            else:
                held = []
                yield from _arguments(reader, dialect, held.append)
        elif others or key in _OTHERS:
            yield from value(reader, dialect, lambda _: None)
        else:
            raise Malformed(f"{key[:80]!r} is no part of a call")
        if (yield from reader.expect(",", "}")) == "}":
            break
        if dialect.python and (yield from reader.follows(("}",))):
            break
    if name is None:
        raise Malformed("a call has no name")
    if not begun:
        calls.begin(name)
        calls.arguments("{}")
    calls.commit()


def _text(reader: Reader, dialect: Dialect) -> Reading[str]:
    yield from reader.blank()
    if not (yield from reader.starts(dialect.quotes)):
        raise Malformed("a text is missing")
    simple = SIMPLE_STRING.match(reader.text, reader.at)
    if simple is not None:
        return reader.take(len(simple[0]))[1:-1]
    pieces: list[str] = []
    yield from value(reader, dialect, pieces.append)
    string: str = json.loads("".join(pieces))
    return string


def _arguments(reader: Reader, dialect: Dialect, emit: Emit) -> Reading[None]:
    """An object; null is the empty object; a string contains the JSON of one."""
    yield from reader.blank()
    if (yield from reader.peek()) == "{":
        yield from value(reader, dialect, emit)
        return
    pieces: list[str] = []
    yield from value(reader, dialect, pieces.append)
    parsed = json.loads("".join(pieces))
    if isinstance(parsed, str):
        try:
            parsed = json.loads(parsed) if parsed.strip() else None
        except ValueError as error:
            raise Malformed("arguments are no JSON") from error
    if parsed is not None and not isinstance(parsed, dict):
        raise Malformed("arguments are no object")
    emit(text_of(parsed or {}))
