"""Mistral: a JSON list behind `[TOOL_CALLS]`, or, from v11 on, the name and `[ARGS]` before the arguments."""

from __future__ import annotations

from runtime.formats.tools.base import CallSink
from runtime.formats.tools.json_calls import JsonCalls
from runtime.formats.tools.named_calls import NamedCalls
from runtime.formats.tools.reader import Reader, Reading

COMPACT = NamedCalls(opener="[TOOL_CALLS]", after="[ARGS]")


class _Either(JsonCalls):
    """Reads both forms."""

    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        blank = yield from reader.width_of_blank()
        if (yield from reader.starts(("[", "{"), blank)):
            yield from super().read(reader, trigger, calls)
        else:
            yield from COMPACT.read(reader, trigger, calls)


class _Compact(NamedCalls):
    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        yield from MISTRAL.read(reader, trigger, calls)


MISTRAL = _Either("[TOOL_CALLS] [", "]", listed=True)
MISTRAL_COMPACT = _Compact(opener="[TOOL_CALLS]", after="[ARGS]")
