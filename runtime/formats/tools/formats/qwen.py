"""Qwen: `<tool_call>` around a JSON object; Qwen3-Coder and Step 3.5: tags for each argument. Hermes, Trinity
and Granite 4 also use the first form."""

from __future__ import annotations

from runtime.formats.tools.base import CallSink
from runtime.formats.tools.json_calls import JsonCalls
from runtime.formats.tools.reader import Reader, Reading
from runtime.formats.tools.tagged import TaggedCalls

QWEN = JsonCalls("<tool_call>\n", "\n</tool_call>", separator="\n")
HERMES = JsonCalls("<tool_call>", "</tool_call>")
CODER = TaggedCalls(
    begin="<tool_call>\n",
    end="\n</tool_call>",
    opener="<function=",
    name_end=">",
    closer="</function>",
    key_open="<parameter=",
    key_end=">",
    value_end="</parameter>",
    gap="\n",
    padding="\n",
)
MIMO = TaggedCalls(
    begin="<tool_call>\n",
    end="\n</tool_call>",
    opener="<function=",
    name_end=">",
    closer="</function>",
    key_open="<parameter=",
    key_end=">",
    value_end="</parameter>",
    gap="\n",
    entities=True,
)


class _Trinity(JsonCalls):
    """Skips marks of reasoning."""

    @property
    def triggers(self) -> tuple[str, ...]:  # type: ignore[override]
        return (*super().triggers, "<think>", "</think>")

    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        if trigger.endswith("think>"):
            reader.reset()
        else:
            yield from super().read(reader, trigger, calls)


TRINITY = _Trinity("<tool_call>\n", "\n</tool_call>", separator="\n")
