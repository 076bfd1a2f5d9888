"""Formats that write a call's name in marks of its own, followed by its arguments as a JSON object."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.formats.tools.base import CallSink, WrittenCalls
from runtime.formats.tools.reader import Malformed, Reader, Reading
from runtime.formats.tools.types import Call, StructureInfo
from runtime.formats.tools.values import JSON, Dialect, Emit, text_of, value

LONGEST_NAME = 256
_OTHERWISE = {"<|tool_call>call:": "<|tool_call|>call:", "<tool_call|>": "<|tool_call|>"}


def spelled(*marks: str) -> tuple[str, ...]:
    """Marks, and how some documents write them: with ASCII bars."""
    present = [mark for mark in marks if mark]
    return tuple(dict.fromkeys(present + [_OTHERWISE.get(mark, mark.replace("｜", "|")) for mark in present]))


def arguments(reader: Reader, dialect: Dialect, emit: Emit) -> Reading[None]:
    """An object. Raises Malformed."""
    yield from reader.blank()
    if (yield from reader.peek()) != "{":
        raise Malformed("arguments are missing")
    yield from value(reader, dialect, emit)


@dataclass(frozen=True)
class NamedCalls(WrittenCalls):
    """begin, end: around all calls ("": nothing). opener, closer: around one call. before: between the opener
    and the name. after: between the name and its arguments. behind: between the arguments and the closer.
    separator: between calls. prefix, suffix: around the name; "{}" in the suffix is the call's number.
    single: a structural tag of the older form has one call, without the wrapper of all calls."""

    opener: str
    after: str
    closer: str = ""
    begin: str = ""
    end: str = ""
    before: str = ""
    behind: str = ""
    separator: str = ""
    prefix: str = ""
    suffix: str = ""
    dialect: Dialect = JSON
    single: bool = False

    @property
    def triggers(self) -> tuple[str, ...]:  # type: ignore[override]
        return spelled(self.begin.strip(), self.opener.strip())

    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        if trigger in spelled(self.begin.strip()):
            yield from reader.expect(*spelled(self.opener))
        while True:
            yield from self.one(reader, calls)
            if not (yield from self.next_one(reader)):
                break
        reader.reset()

    def next_one(self, reader: Reader) -> Reading[bool]:
        """Whether another call follows; its opener, or the end of all calls, is consumed."""
        mark = yield from reader.follows(spelled(self.opener, self.end.strip()))
        return mark in spelled(self.opener)

    def one(self, reader: Reader, calls: CallSink) -> Reading[None]:
        """Read one call; its opening mark has been read."""
        if self.before:
            yield from reader.expect(*spelled(self.before))
        after = spelled(self.after.strip())
        name = (yield from reader.until(after or ("{",), LONGEST_NAME)).strip()
        if after:
            yield from reader.expect(*after)
        yield from self.call(reader, name, calls)
        for mark in (self.behind, self.closer):
            if mark.strip():
                yield from reader.follows(spelled(mark.strip()))

    def call(self, reader: Reader, name: str, calls: CallSink) -> Reading[None]:
        """The call with this name; its arguments follow."""
        calls.begin(name)
        yield from arguments(reader, self.dialect, calls.arguments)
        calls.commit()

    def written(self, number: int, call: Call) -> str:
        name = f"{self.prefix}{call.name}{self.suffix.format(number)}"
        arguments = text_of(dict(call.arguments))
        return f"{self.opener}{self.before}{name}{self.after}{arguments}{self.behind}{self.closer}"

    @property
    def around(self) -> tuple[str, str, str]:  # type: ignore[override]
        return self.begin, self.separator, self.end

    def structure_info(self, name: str) -> StructureInfo | None:
        before, after = self.written(0, Call(name, {})).rsplit("{}", 1)
        begin, end = ("", "") if self.single else (self.begin, self.end)
        return StructureInfo(begin + before, after + end, (begin or self.opener).strip())
