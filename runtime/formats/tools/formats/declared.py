"""Tool-call formats that need only a declaration: JSON objects or lists, Python calls, a tag for each
argument; and Mistral's two forms, each of which also reads the other."""

from __future__ import annotations

from dataclasses import replace

from runtime.formats.tools.base import CallSink
from runtime.formats.tools.json_calls import JsonCalls
from runtime.formats.tools.named_calls import NamedCalls
from runtime.formats.tools.pythonic import PythonicCalls
from runtime.formats.tools.reader import Reader, Reading
from runtime.formats.tools.tagged import TaggedCalls
from runtime.formats.tools.values import PYTHON

LLAMA_3 = JsonCalls("<|python_tag|>", separator=";", bare="{", arguments="parameters", dialect=PYTHON)
INTERN_S1 = JsonCalls(
    "<|action_start|> <|plugin|>\n",
    "<|action_end|>",
    separator="\n",
    arguments="parameters",
    older='{"name": {}, "parameters": ',
)
GIGACHAT_3 = JsonCalls("<|message_sep|>\n\nfunction call<|role_sep|>\n", "</s>", older="")
HUNYUAN = JsonCalls("<tool_calls>[", "]</tool_calls>", listed=True)
COMMAND = JsonCalls(
    "<|START_ACTION|>[", "]<|END_ACTION|>", listed=True, name="tool_name", arguments="parameters"
)
GRANITE = JsonCalls("<|tool_call|>[", "]", listed=True, aliases=("<tool_call>",))
PHI_4 = JsonCalls("<|tool_call|>[", "]<|/tool_call|>", listed=True, aliases=("functools",))
LIST = JsonCalls("[", "]", listed=True, arguments="parameters", bare="[", others=True)


PYTHONIC = PythonicCalls("[", "]", aliases=("<|python_start|>",), closers=("<|python_end|>",))
LFM_2 = PythonicCalls("<|tool_call_start|>[", "]<|tool_call_end|>", json=LIST)
OLMO_3 = PythonicCalls("<function_calls>\n", "\n</function_calls>", listed=False)
MINICPM = PythonicCalls(
    "<|tool_call_start|>\n```python\n",
    "\n```\n<|tool_call_end|>",
    listed=False,
    within=("```python", "```"),
)


GLM_4_7 = TaggedCalls(
    opener="<tool_call>",
    name_end="",
    closer="</tool_call>",
    key_open="<arg_key>",
    key_end="</arg_key>\n<arg_value>",
    value_end="</arg_value>",
    separator="",
)
GLM_4_5 = replace(GLM_4_7, name_end="\n", gap="\n", name_ends=("\\n",), filler="\\n")


MINIMAX_M2 = TaggedCalls(
    begin="<minimax:tool_call>\n",
    end="\n</minimax:tool_call>",
    block=True,
    opener='<invoke name="',
    name_end='">',
    closer="</invoke>",
    key_open='<parameter name="',
    key_end='">',
    value_end="</parameter>",
    gap="\n",
)
STEP_3 = TaggedCalls(
    begin="<｜tool_calls_begin｜>\n",
    end="\n<｜tool_calls_end｜>",
    block=True,
    call="<｜tool_call_begin｜>function<｜tool_sep｜>",
    opener='<steptml:invoke name="',
    name_end='">',
    closer="</steptml:invoke>",
    key_open='<steptml:parameter name="',
    key_end='">',
    value_end="</steptml:parameter>",
    tail="<｜tool_call_end｜>",
)


_MISTRAL_V11 = NamedCalls(opener="[TOOL_CALLS]", after="[ARGS]")


class _Either(JsonCalls):
    """Reads both forms."""

    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        blank = yield from reader.width_of_blank()
        if (yield from reader.starts(("[", "{"), blank)):
            yield from super().read(reader, trigger, calls)
        else:
            yield from _MISTRAL_V11.read(reader, trigger, calls)


class _Compact(NamedCalls):
    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        yield from MISTRAL.read(reader, trigger, calls)


MISTRAL = _Either("[TOOL_CALLS] [", "]", listed=True)
MISTRAL_COMPACT = _Compact(opener="[TOOL_CALLS]", after="[ARGS]")
