"""Formats that write each argument as plain text between tags."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.formats.tools import schema as schemas
from runtime.formats.tools.base import CallSink, WrittenCalls
from runtime.formats.tools.named_calls import LONGEST_NAME
from runtime.formats.tools.reader import Reader, Reading
from runtime.formats.tools.schema import plain, property_of, typed
from runtime.formats.tools.types import Call, Tool
from runtime.formats.tools.values import JSON, text_of, value


def _nonempty(*marks: str) -> tuple[str, ...]:
    return tuple(filter(None, marks))


@dataclass(frozen=True)
class TaggedCalls(WrittenCalls):
    """begin, end: around one call, or around all calls if `block`. opener, name_end, closer: around one call:
    opener NAME name_end ARGUMENTS closer. key_open, key_end, value_end: around one argument: key_open KEY
    key_end VALUE value_end. gap: between all of these when written; any white space is read. padding: around
    a value, and not part of it. separator: between calls. entities: values are HTML-escaped. call, tail:
    before the opener and after the closer. name_ends: other texts that end a name. empty: ends a call without
    arguments, instead of name_end. filler: text that some models write instead of white space."""

    opener: str
    name_end: str
    closer: str
    key_open: str
    key_end: str
    value_end: str
    begin: str = ""
    end: str = ""
    block: bool = False
    gap: str = ""
    padding: str = ""
    separator: str = "\n"
    entities: bool = False
    call: str = ""
    tail: str = ""
    name_ends: tuple[str, ...] = ()
    empty: str = ""
    filler: str = ""

    @property
    def triggers(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(filter(None, (self.begin.strip(), self.call, self.opener))))

    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        if trigger != self.opener:
            if trigger != self.call and self.call:
                yield from reader.follows((self.call,))
            yield from reader.expect(self.opener)
        while True:
            yield from self.one(reader, calls)
            mark = yield from reader.follows(_nonempty(self.call, self.opener, self.end.strip()))
            if not mark or mark == self.end.strip() or mark == self.begin.strip():
                break
            if mark == self.call:
                yield from reader.expect(self.opener)
        reader.reset()

    def one(self, reader: Reader, calls: CallSink) -> Reading[None]:
        """A call, after its opener."""
        ends = _nonempty(self.name_end, *self.name_ends, self.empty, self.key_open, self.closer)
        name = (yield from reader.until(ends, LONGEST_NAME)).strip()
        end = yield from reader.starts(ends)
        closed = end in (self.closer, self.empty)
        if end != self.key_open:
            reader.take(len(end))
        tool = calls.begin(name.strip("\"'"))
        if not closed:
            yield from reader.blank()
            if (yield from reader.starts(("{",))):
                yield from value(reader, JSON, calls.arguments)
                yield from reader.expect(self.closer)
                calls.commit()
                return
        calls.arguments("{")
        first = True
        ends = _nonempty(self.key_open, self.closer, self.end.strip())
        while not closed:
            yield from self._filled(reader)
            if (yield from reader.expect(*ends)) != self.key_open:
                break
            key, text = yield from self.argument(reader, tool)
            calls.arguments(f"{'' if first else ', '}{text_of(key)}: {text}")
            first = False
        calls.arguments("}")
        calls.commit()
        if self.tail:
            yield from reader.follows((self.tail,))

    def _filled(self, reader: Reader) -> Reading[None]:
        if self.filler:
            yield from reader.follows((self.filler,))

    def argument(self, reader: Reader, tool: Tool) -> Reading[tuple[str, str]]:
        """An argument's name and its JSON, after key_open."""
        first, _, second = self.key_end.partition("\n")
        key = (yield from reader.until((first,), LONGEST_NAME)).strip()
        yield from reader.expect(first)
        if second:
            yield from self._filled(reader)
            yield from reader.expect(second)
        text = (yield from self._value(reader, tool)).removeprefix(self.padding).removesuffix(self.padding)
        if self.entities:
            text = html.unescape(text)
        return key, typed(text, property_of(tool, key))

    def _value(self, reader: Reader, tool: Tool) -> Reading[str]:
        """Up to the tag that ends the value: one after which the call continues or ends, because a value may
        contain the same text. That tag may be missing before the end of the call, and before another declared
        argument."""
        after = _nonempty(self.key_open, self.closer, self.end.strip(), self.filler)
        pieces: list[str] = []
        while True:
            pieces.append((yield from reader.until((self.value_end, self.closer, self.key_open))))
            mark = yield from reader.starts((self.value_end, self.closer, self.key_open))
            if mark == self.value_end:
                blank = yield from reader.width_of_blank(len(mark))
                if (yield from reader.starts(after, len(mark) + blank)):
                    reader.take(len(mark))
                    return "".join(pieces)
            elif mark == self.closer:
                if (yield from self._ends_here(reader, len(mark))):
                    return "".join(pieces)
            elif "".join(pieces[-1:]).endswith("\n") and (yield from self._declared(reader, tool)):
                return "".join(pieces)
            pieces.append(reader.take(len(mark)))

    def _ends_here(self, reader: Reader, skip: int) -> Reading[bool]:
        """Whether the text after the end of a call is valid there."""
        skip += yield from reader.width_of_blank(skip)
        if reader.ended and reader.left == skip:
            return True
        after = _nonempty(self.end.strip(), self.opener, self.begin.strip(), self.tail)
        return bool((yield from reader.starts(after, skip)))

    def _declared(self, reader: Reader, tool: Tool) -> Reading[bool]:
        """Whether the argument that seems to begin here is one of the tool's."""
        end, start = self.key_end.partition("\n")[0], len(self.key_open)
        while True:
            key, separator, _ = reader.text[reader.at + start : reader.at + start + LONGEST_NAME].partition(
                end
            )
            if separator or reader.ended or len(key) >= LONGEST_NAME:
                return bool(separator) and property_of(tool, key.strip()) is not None
            yield

    def written(self, number: int, call: Call) -> str:
        parts = [f"{self.call}{self.opener}{call.name}{self.name_end.rstrip() or self.name_end.strip()}"]
        for key, item in call.arguments.items():
            before = f"{self.opened(key, isinstance(item, str))}{self.padding}"
            parts.append(f"{before}{self.shown(plain(item))}{self.padding}{self.value_end}")
        parts.append(self.closer)
        text = self.gap.join(parts) + self.tail
        return text if self.block else f"{self.begin}{text}{self.end}"

    @property
    def around(self) -> tuple[str, str, str]:  # type: ignore[override]
        return (self.begin, self.separator, self.end) if self.block else ("", self.separator, "")

    def call_tag(self, tool: Tool, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        if not schemas.is_plain(tool.parameters):
            return None
        schema = tool.parameters
        begin, end = self.written(0, Call(tool.name, {})).rsplit(self.gap + self.closer, 1)
        arguments = [
            tag if key in schema.get("required", ()) else {"type": "optional", "content": tag}
            for key, inner in schema.get("properties", {}).items()
            for tag in [self.argument_tag(key, inner, schema)]
        ]
        closer = {"type": "const_string", "value": self.gap + self.closer + end}
        content = {"type": "sequence", "elements": [*arguments, closer]}
        return {"type": "tag", "begin": begin, "content": content, "end": ""}

    def argument_tag(self, key: str, schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
        """One argument: if it is a text, text up to its end, else JSON."""
        schema = schemas.with_definitions(schemas.referred(schema, root), root)
        only_text = schemas.types_of(schema) == {"string"}
        begin = f"{self.gap}{self.opened(key, only_text)}{self.padding}"
        if only_text:
            marks = [self.value_end, self.closer, self.key_open, *"&" * self.entities]
            content = schemas.text_tag(schema, self.shown, marks)
        else:
            content = {"type": "json_schema", "json_schema": schema}
        return {"type": "tag", "begin": begin, "content": content, "end": self.padding + self.value_end}

    def opened(self, key: str, only_text: bool) -> str:
        """The text before an argument's value."""
        return f"{self.key_open}{key}{self.key_end}"

    def shown(self, text: str) -> str:
        return html.escape(text, quote=False) if self.entities else text
