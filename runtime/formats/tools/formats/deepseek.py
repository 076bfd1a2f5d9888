"""DeepSeek V3, V3.1 and V3.2."""

from __future__ import annotations

import json
from dataclasses import replace

from runtime.formats.tools.base import CallSink
from runtime.formats.tools.named_calls import LONGEST_NAME, NamedCalls
from runtime.formats.tools.reader import Reader, Reading
from runtime.formats.tools.schema import property_of, refused, typed
from runtime.formats.tools.tagged import TaggedCalls
from runtime.formats.tools.types import StructureInfo, Tool
from runtime.formats.tools.values import text_of

_SEP = "<｜tool▁sep｜>"

V3 = NamedCalls(
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    opener="<｜tool▁call▁begin｜>",
    closer="<｜tool▁call▁end｜>",
    before=f"function{_SEP}",
    after="\n```json\n",
    behind="\n```",
    separator="\n",
)
V3_1 = replace(V3, before="", after=_SEP, behind="", separator="", single=True)


class _V32(TaggedCalls):
    """Each argument declares whether it is a text. Calls in V3.1's form are read as well."""

    @property
    def triggers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*super().triggers, *V3_1.triggers)

    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        reading = V3_1.read if trigger in V3_1.triggers else super().read
        yield from reading(reader, trigger, calls)

    def structure_info(self, name: str) -> StructureInfo | None:
        return StructureInfo(f"{self.opener}{name}{self.name_end}", self.closer, "<｜DSML｜invoke")

    def argument(self, reader: Reader, tool: Tool) -> Reading[tuple[str, str]]:
        key = yield from reader.until(('"',), LONGEST_NAME)
        reader.take(1)
        attributes = yield from reader.until((">",), LONGEST_NAME)
        reader.take(1)
        text = yield from self._value(reader, tool)
        if 'string="true"' in attributes:
            return key, text_of(text)
        if 'string="false"' not in attributes:
            return key, typed(text, property_of(tool, key))
        try:
            return key, text_of(json.loads(text, parse_constant=refused))
        except (ValueError, RecursionError):
            return key, text_of(text)

    def opened(self, key: str, only_text: bool) -> str:
        return f'{self.key_open}{key}" string="{"true" if only_text else "false"}">'


V3_2 = _V32(
    begin="<｜DSML｜function_calls>\n",
    end="\n</｜DSML｜function_calls>",
    block=True,
    opener='<｜DSML｜invoke name="',
    name_end='">',
    closer="</｜DSML｜invoke>",
    key_open='<｜DSML｜parameter name="',
    key_end='">',
    value_end="</｜DSML｜parameter>",
    gap="\n",
    empty='"/>',
)
