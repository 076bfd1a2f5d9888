"""Mistral: a JSON list behind `[TOOL_CALLS]`, or, from v11 on, the name and `[ARGS]` before the arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from runtime.formats.tools.base import CallSink
from runtime.formats.tools.json_calls import JsonCalls
from runtime.formats.tools.named_calls import NamedCalls
from runtime.formats.tools.reader import Reader, Reading
from runtime.formats.tools.types import Call, StructureInfo, Tool

COMPACT = NamedCalls(opener="[TOOL_CALLS]", after="[ARGS]")


class _Either(JsonCalls):
    """Reads both forms."""

    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        blank = yield from reader.width_of_blank()
        if (yield from reader.starts(("[", "{"), blank)):
            yield from super().read(reader, trigger, calls)
        else:
            yield from COMPACT.read(reader, trigger, calls)


class _Compact(_Either):
    def render(self, calls: Sequence[Call]) -> str:
        return COMPACT.render(calls)

    @property
    def around(self) -> tuple[str, str, str]:  # type: ignore[override]
        return COMPACT.around

    def structure_info(self, name: str) -> StructureInfo | None:
        return COMPACT.structure_info(name)

    def call_tag(self, tool: Tool, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        return COMPACT.call_tag(tool, schema)


MISTRAL = _Either("[TOOL_CALLS] [", "]", listed=True)
MISTRAL_COMPACT = _Compact("[TOOL_CALLS] [", "]", listed=True)
