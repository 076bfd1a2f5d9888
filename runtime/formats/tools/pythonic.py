"""Formats whose calls are written as in Python: f(a=1, b="x"). Only literals, with keywords."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from runtime.formats.tools.base import BaseFormatDetector, CallSink, WrittenCalls
from runtime.formats.tools.reader import NAME, Malformed, Reader, Reading
from runtime.formats.tools.schema import is_plain, with_definitions
from runtime.formats.tools.types import Call, Tool
from runtime.formats.tools.values import PYTHON, text_of, value

_MOST_OPTIONAL = 40


@dataclass(frozen=True)
class PythonicCalls(WrittenCalls):
    """begin, end: around all calls. listed: in a list; otherwise one call per line. aliases: other texts that
    begin the calls, closers: that end them. within: texts that may come between begin and the calls, and at
    their end. json: another format whose calls may be there instead."""

    begin: str
    end: str
    listed: bool = True
    aliases: tuple[str, ...] = ()
    closers: tuple[str, ...] = ()
    within: tuple[str, str] = ("", "")
    json: BaseFormatDetector | None = None

    @property
    def triggers(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys((self.begin.strip().removesuffix("[") or "[", *self.aliases)))

    def finder(self, names: Sequence[str] | None) -> re.Pattern[str] | None:
        if "[" not in self.triggers:
            return None
        marks = [re.escape(one) for one in self.triggers if one != "["]
        name = r"[\w.\-]{1,256}" if names is None else f"(?:{'|'.join(map(re.escape, names))})"
        call = rf"\[(?=\s{{0,64}}{name}\s{{0,64}}\(\s{{0,64}}(?:\)|[\w.\-]{{1,256}}\s{{0,64}}=))"
        return re.compile("|".join([*marks, call]))

    @cached_property
    def unsure(self) -> re.Pattern[str] | None:  # type: ignore[override]
        if "[" not in self.triggers:
            return None
        name = r"[\w.\-]{1,256}\s{0,64}"
        return re.compile(rf"\[\s{{0,64}}(?:{name}(?:\(\s{{0,64}}(?:{name})?)?)?\Z")

    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        opened = trigger == "["
        if not opened and self.within[0].strip():
            yield from reader.follows((self.within[0].strip(),))
        if not opened:
            opened = bool((yield from reader.follows(("[",))))
            if self.listed and not opened and self.json is None:
                raise Malformed("no list of calls")
        if self.json is not None and (yield from reader.starts(("{",), (yield from reader.width_of_blank()))):
            yield from self.json.read(reader, "[" if opened else "", calls)
        else:
            yield from self._calls(reader, opened, calls)
        ends = (self.within[1].strip(), self.end.strip().removeprefix("]"), *self.closers)
        for _ in range(2 if any(ends) else 0):
            yield from reader.follows(tuple(filter(None, ends)))
        reader.reset()

    def _calls(self, reader: Reader, opened: bool, calls: CallSink) -> Reading[None]:
        while True:
            yield from self._call(reader, calls)
            if not opened:
                if not (yield from self._another(reader)):
                    return
            # The closing bracket after the last one may follow a comma, or be missing.
            elif (yield from reader.follows((",", "]"))) != "," or (yield from reader.follows(("]",))):
                return

    def _another(self, reader: Reader) -> Reading[bool]:
        """Whether a call follows on the next line."""
        skip = yield from reader.width_of_blank()
        while True:
            match = NAME.match(reader.text, reader.at + skip)
            size = match.end() - reader.at if match else skip
            if size < reader.left or reader.ended or size > skip + 256:
                return size > skip and reader.text[reader.at + size : reader.at + size + 1] == "("
            yield

    def _call(self, reader: Reader, calls: CallSink) -> Reading[None]:
        calls.begin((yield from reader.named("(")))
        calls.arguments("{")
        comma = ""
        while (reader.solid() or (yield from reader.next_solid())) != ")":
            if comma:
                yield from reader.expect(",")
                if (reader.solid() or (yield from reader.next_solid())) == ")":
                    break
            key = yield from reader.named("=")
            calls.arguments(f"{comma}{text_of(key)}: ")
            yield from value(reader, PYTHON, calls.arguments)
            comma = ", "
        reader.take(1)
        calls.arguments("}")
        calls.commit()

    def written(self, number: int, call: Call) -> str:
        arguments = (f"{key}={_literal(item)}" for key, item in call.arguments.items())
        return f"{call.name}({', '.join(arguments)})"

    @property
    def around(self) -> tuple[str, str, str]:  # type: ignore[override]
        return self.begin, ", " if self.listed else "\n", self.end

    def auto_trigger(self) -> str | None:
        return None if self.triggers[0] == "[" else self.triggers[0]

    def call_tag(self, tool: Tool, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        if not is_plain(tool.parameters):
            return None
        schema = tool.parameters

        def argument(key: str) -> dict[str, Any]:
            inner = with_definitions(schema["properties"][key], schema)
            return sequence(const(f"{key}="), {"type": "json_schema", "json_schema": inner})

        content = listed_arguments(schema, ", ", argument)
        if content is None:
            return None
        return {"type": "tag", "begin": f"{tool.name}(", "content": sequence(*content, const(")")), "end": ""}


def listed_arguments(
    schema: Mapping[str, Any], comma: str, argument: Callable[[str], dict[str, Any]]
) -> list[dict[str, Any]] | None:
    """Arguments separated by commas: the required ones, then any of the others. None: too many optional
    ones."""
    names = list(schema.get("properties", {}))
    required = [key for key in names if key in schema.get("required", ())]
    optional = [key for key in names if key not in required]
    if len(optional) > _MOST_OPTIONAL:
        return None

    def others(left: list[str]) -> list[dict[str, Any]]:
        return [{"type": "optional", "content": sequence(const(comma), argument(key))} for key in left]

    if required:
        more = [sequence(const(comma), argument(key)) for key in required[1:]]
        return [argument(required[0]), *more, *others(optional)]
    if not optional:
        return []
    # The first one determines the positions of commas.
    firsts = [sequence(argument(key), *others(optional[at + 1 :])) for at, key in enumerate(optional)]
    return [{"type": "optional", "content": {"type": "or", "elements": firsts}}]


def sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def _literal(item: Any) -> str:
    """As Python writes it, but with JSON strings."""
    match item:
        case None | bool():
            return str(item)
        case str():
            return text_of(item)
        case list():
            return f"[{', '.join(map(_literal, item))}]"
        case dict():
            return f"{{{', '.join(f'{text_of(key)}: {_literal(one)}' for key, one in item.items())}}}"
    return text_of(item)
