"""The tool-call formats of model families. Most need only a declaration."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from runtime.formats.tools.base import BaseFormatDetector, CallSink
from runtime.formats.tools.json_calls import JsonCalls
from runtime.formats.tools.named_calls import LONGEST_NAME, NamedCalls, arguments
from runtime.formats.tools.pythonic import PythonicCalls, const, listed_arguments, sequence
from runtime.formats.tools.reader import Malformed, Reader, Reading
from runtime.formats.tools.schema import (
    is_plain,
    property_of,
    referred,
    refused,
    text_tag,
    typed,
    types_of,
    with_definitions,
)
from runtime.formats.tools.tagged import TaggedCalls
from runtime.formats.tools.types import Call, StructureInfo, Tool
from runtime.formats.tools.values import JSON, PYTHON, Dialect, text_of

# -- JSON objects or lists, Python calls, a tag for each argument --------------------------------------------

LLAMA_3 = JsonCalls("<|python_tag|>", separator=";", bare="{", arguments="parameters", dialect=PYTHON)
INTERN_S1 = JsonCalls(
    "<|action_start|> <|plugin|>\n", "<|action_end|>", separator="\n", arguments="parameters",
    older='{"name": {}, "parameters": ',
)  # fmt: skip
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
    "<|tool_call_start|>\n```python\n", "\n```\n<|tool_call_end|>", listed=False, within=("```python", "```")
)

GLM_4_7 = TaggedCalls(
    "<tool_call>", "", "</tool_call>", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", separator=""
)
GLM_4_5 = replace(GLM_4_7, name_end="\n", gap="\n", name_ends=("\\n",), filler="\\n")
MINIMAX_M2 = TaggedCalls(
    '<invoke name="', '">', "</invoke>", '<parameter name="', '">', "</parameter>",
    begin="<minimax:tool_call>\n", end="\n</minimax:tool_call>", block=True, gap="\n",
)  # fmt: skip
STEP_3 = TaggedCalls(
    '<steptml:invoke name="', '">', "</steptml:invoke>",
    '<steptml:parameter name="', '">', "</steptml:parameter>",
    begin="<｜tool_calls_begin｜>\n", end="\n<｜tool_calls_end｜>", block=True,
    call="<｜tool_call_begin｜>function<｜tool_sep｜>", tail="<｜tool_call_end｜>",
)  # fmt: skip


# -- Mistral's two forms, each of which also reads the other -------------------------------------------------

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


# -- Qwen: `<tool_call>` around a JSON object. Qwen3-Coder, Step 3.5: tags for each argument -----------------

QWEN = JsonCalls("<tool_call>\n", "\n</tool_call>", separator="\n")
HERMES = JsonCalls("<tool_call>", "</tool_call>")
CODER = TaggedCalls(
    "<function=", ">", "</function>", "<parameter=", ">", "</parameter>",
    begin="<tool_call>\n", end="\n</tool_call>", gap="\n", padding="\n",
)  # fmt: skip
MIMO = replace(CODER, padding="", entities=True)


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


# -- DeepSeek V3, V3.1 and V3.2 ------------------------------------------------------------------------------

_SEP = "<｜tool▁sep｜>"

V3 = NamedCalls(
    begin="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>", separator="\n",
    opener="<｜tool▁call▁begin｜>", closer="<｜tool▁call▁end｜>",
    before=f"function{_SEP}", after="\n```json\n", behind="\n```",
)  # fmt: skip
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
    '<｜DSML｜invoke name="', '">', "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="', '">', "</｜DSML｜parameter>",
    begin="<｜DSML｜function_calls>\n", end="\n</｜DSML｜function_calls>", block=True, gap="\n", empty='"/>',
)  # fmt: skip


# -- Kimi K2 -------------------------------------------------------------------------------------------------

_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::(?P<number>\d+))?")


class _Kimi(NamedCalls):
    def call(self, reader: Reader, name: str, calls: CallSink) -> Reading[None]:
        match = _ID.fullmatch(name)
        if match is None:
            raise Malformed("a call has no name")
        if not (name.isdigit() and name not in calls.tools):
            yield from super().call(reader, match["name"], calls)
            return
        # Only a number: find the tool by its arguments.
        pieces: list[str] = []
        yield from arguments(reader, JSON, pieces.append)
        keys = json.loads("".join(pieces))
        fits = {
            tool.name: sum(property_of(tool, key) is not None for key in keys)
            for tool in calls.tools.values()
        }
        best = max(fits, key=lambda one: fits[one], default="")
        if not best or (keys and not fits[best]):
            raise Malformed("a call has no name")
        calls.whole(best, "".join(pieces))

    def call_tag(self, tool: Tool, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        number = {"type": "regex", "pattern": "[0-9]{1,3}"}
        after = {"type": "const_string", "value": self.after}
        arguments = {"type": "json_schema", "json_schema": schema}
        begin = f"{self.opener}{self.prefix}{tool.name}:"
        content = {"type": "sequence", "elements": [number, after, arguments]}
        return {"type": "tag", "begin": begin, "content": content, "end": self.closer}


KIMI_K2 = _Kimi(
    begin="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>",
    opener="<|tool_call_begin|>", closer="<|tool_call_end|>",
    prefix="functions.", suffix=":{}", after="<|tool_call_argument_begin|>",
)  # fmt: skip


# -- gpt-oss: the channels of harmony (cookbook.openai.com/articles/openai-harmony) --------------------------

_STARTS = ("<|start|>", "<|channel|>")
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MESSAGE = "<|message|>"
_MANY_ENDS = re.compile("(?:" + "|".join(map(re.escape, _ENDS)) + ")*")
_RECIPIENT = re.compile(r"to=([\w.\-]+)")


class Harmony(BaseFormatDetector):
    """Calls are messages to a recipient. Reasoning (analysis) is skipped; the final channel is content."""

    triggers = (*_STARTS, *_ENDS)

    def read(self, reader: Reader, trigger: str, calls: CallSink) -> Reading[None]:
        if trigger in _STARTS:
            header = trigger + (yield from reader.until((_MESSAGE,), LONGEST_NAME))
            reader.take(len(_MESSAGE))
            recipient = _RECIPIENT.search(header)
            if recipient is not None:
                calls.begin(recipient[1].rpartition(".")[2])
                yield from arguments(reader, JSON, calls.arguments)
                calls.commit()
                if (yield from reader.follows(_ENDS)):
                    yield from reader.follows(("commentary",))
            elif "analysis" in header:
                yield from self._skip(reader)
        else:
            run = _MANY_ENDS.match(reader.text, reader.at)
            if run is not None:
                trigger = reader.take(run.end() - run.start()) or trigger
            if trigger.endswith("<|call|>"):
                yield from reader.follows(("commentary",))
        reader.reset()

    def _skip(self, reader: Reader) -> Reading[None]:
        """Skip the rest of a message."""
        try:
            yield from reader.until((*_STARTS, *_ENDS))
        except Malformed:
            reader.take(reader.left)

    def render(self, calls: Sequence[Call]) -> str:
        return "".join(
            f"<|start|>assistant<|channel|>commentary to=functions.{call.name} <|constrain|>json{_MESSAGE}"
            f"{text_of(dict(call.arguments))}<|call|>"
            for call in calls
        )

    def auto_trigger(self) -> str | None:
        return "<|channel|>commentary to="

    around = ("", "<|start|>assistant", "")

    def structure_info(self, name: str) -> StructureInfo | None:
        head = f"<|channel|>commentary to=functions.{name} <|constrain|>json{_MESSAGE}"
        return StructureInfo(head, "<|call|>", "<|channel|>commentary to=")


GPT_OSS = Harmony()


# -- Gemma 4: keys without quotes, strings in marks of their own ---------------------------------------------

_QUOTE = '<|"|>'
_BARE_KEY = re.compile(r"[\w.\-]{1,64}")
_DEEPEST = 8
_OF_ARRAYS = {"minItems", "maxItems", "uniqueItems", "contains", "prefixItems"}


class _Gemma(NamedCalls):
    def written(self, number: int, call: Call) -> str:
        return f"{self.opener}{call.name}{_gemma_value(call.arguments)}{self.closer}"

    def structure_info(self, name: str) -> StructureInfo | None:
        return None

    def call_tag(self, tool: Tool, schema: Mapping[str, Any]) -> dict[str, Any] | None:
        content = _value_tag({"type": "object", "properties": {}, **tool.parameters}, tool.parameters, 0)
        if content is None:
            return None
        return {"type": "tag", "begin": self.opener + tool.name, "content": content, "end": self.closer}


def _value_tag(schema: Any, root: Mapping[str, Any], depth: int) -> dict[str, Any] | None:
    """The tag of one value; None if structural tags cannot express its schema."""
    schema = with_definitions(referred(schema, root), root)
    kinds = types_of(schema)
    if depth > _DEEPEST or not kinds:
        return None
    if kinds == {"string"}:
        text = text_tag(schema, str, [_QUOTE])
        return {"type": "tag", "begin": _QUOTE, "content": text, "end": _QUOTE}
    if kinds <= {"integer", "number", "boolean", "null"}:
        return {"type": "json_schema", "json_schema": schema}
    content: list[dict[str, Any]] | None = None
    if kinds == {"object"} and "properties" in schema and is_plain(schema):
        values = {key: _value_tag(one, root, depth + 1) for key, one in schema["properties"].items()}
        members = {key: one for key, one in values.items() if one is not None and _BARE_KEY.fullmatch(key)}
        if len(members) == len(values):
            content = listed_arguments(schema, ",", lambda key: sequence(const(f"{key}:"), members[key]))
        brackets = "{}"
    elif kinds == {"array"} and not schema.keys() & _OF_ARRAYS:
        one = _value_tag(schema.get("items"), root, depth + 1)
        if one is not None:
            more = {"type": "star", "content": sequence(const(","), one)}
            content = [{"type": "optional", "content": sequence(one, more)}]
        brackets = "[]"
    return None if content is None else sequence(const(brackets[0]), *content, const(brackets[1]))


def _gemma_value(value: Any) -> str:
    match value:
        case str():
            return f"{_QUOTE}{value}{_QUOTE}"
        case Mapping():
            return f"{{{','.join(f'{key}:{_gemma_value(one)}' for key, one in value.items())}}}"
        case list():
            return f"[{','.join(map(_gemma_value, value))}]"
    return text_of(value)


GEMMA_4 = _Gemma(
    opener="<|tool_call>call:",
    after="",
    closer="<tool_call|>",
    dialect=Dialect(quotes=(_QUOTE,), escaped=False, bare_keys=True),
)
