"""Constraints on calls: what they take is what the format writes, and what they make is parsed as calls of
allowed tools."""

from __future__ import annotations

import json
import random

import jsonschema
import pytest

from runtime.formats.tools import FORMATS, FunctionCallParser
from runtime.formats.tools.constraints import calls_or_json, calls_schema, structure_constraint
from runtime.formats.tools.parser import detector_of
from runtime.formats.tools.types import Call, Tool, tools_of
from runtime.grammar.base import Matcher
from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadRequest
from tests.unit.runtime.formats.tools.calling import TEXTS, calls_of, tool, whole

WEATHER = tool("get_weather", city={"type": "string"}, days={"type": "integer"})
WEATHER["function"]["parameters"]["required"] = ["city"]
SEARCH = tool("search", query={"enum": ["a b", "c"], "type": "string"}, tags=TEXTS)
TOOLS = tools_of([WEATHER, SEARCH, tool("ping")])
BACKEND = make_backend("auto", BYTES)
WRITTEN = [
    Call("get_weather", {"city": "서울", "days": 3}),
    Call("search", {"query": "a b", "tags": ["x", "y"]}),
    Call("search", {"tags": []}),
    Call("ping", {}),
]
KEYS = FORMATS.names()


def matcher(key: str, choice: str, parallel: bool = True) -> Matcher:
    made = structure_constraint(detector_of(key), TOOLS, choice, parallel)
    assert made is not None
    return BACKEND.compile(Constraint(made.kind, json.dumps(made.spec)))


def takes(start: Matcher, text: str) -> bool:
    one = start.copy()
    return one.advance_bytes(text.encode()) and one.may_stop()


@pytest.mark.parametrize("key", KEYS)
def test_what_the_format_writes_is_taken(key: str) -> None:
    render = detector_of(key).render
    start = matcher(key, "required")
    for calls in ([WRITTEN[0]], [WRITTEN[3]], WRITTEN):
        text = render(calls)
        if key == "gigachat3" and len(calls) > 1:
            continue
        assert takes(start, text.removeprefix("<|start|>assistant")), text
    one = matcher(key, "required", parallel=False)
    assert takes(one, render(WRITTEN[:1]).removeprefix("<|start|>assistant"))
    assert not takes(one, render(WRITTEN[:2]).removeprefix("<|start|>assistant"))
    named = matcher(key, "=search")
    assert takes(named, render(WRITTEN[1:2]).removeprefix("<|start|>assistant"))
    assert not takes(named, render(WRITTEN[:1]).removeprefix("<|start|>assistant"))
    assert not takes(start, "I would rather talk.")
    assert not takes(start, render([Call("other", {})]).removeprefix("<|start|>assistant"))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("choice", ["required", "=search"])
def test_what_they_make_are_calls(key: str, choice: str) -> None:
    """Random walks along what is allowed, each to its end."""
    made = structure_constraint(detector_of(key), TOOLS, choice)
    assert made is not None
    start = BACKEND.compile(Constraint(made.kind, json.dumps(made.spec)))
    parser = FunctionCallParser(TOOLS, made.key or key)
    names = {"search"} if choice == "=search" else {one.name for one in TOOLS}
    dice = random.Random(key + choice)
    for _ in range(6):
        content, calls = walked(start, parser, dice)
        assert not content.strip()
        assert calls
        for name, arguments in calls:
            assert name in names
            schema = next(one.parameters for one in TOOLS if one.name == name)
            jsonschema.validate(arguments, schema)


def walked(start: Matcher, parser: FunctionCallParser, dice: random.Random) -> tuple[str, list]:
    one, text = start.copy(), b""
    for _ in range(dice.randint(0, 120)):
        allowed = sorted(one.next_bytes())
        if not allowed or (one.may_stop() and dice.random() < 0.2):
            break
        byte = dice.choice(allowed)
        assert one.advance_bytes(bytes((byte,)))
        text += bytes((byte,))
    if not one.may_stop():
        ending = one.closing(2000)
        assert ending is not None, text
        text += bytes(ending)
    parsed = whole(parser, text.decode())
    return parsed[0], calls_of(parsed)


@pytest.mark.parametrize("key", [key for key in KEYS if detector_of(key).auto_trigger() is not None])
def test_auto_lets_talk_and_holds_calls(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    detector = detector_of(key)
    assert structure_constraint(detector, TOOLS, "auto") is None
    monkeypatch.setenv("SGLANG_TOOL_STRICT_LEVEL", "parameter")
    start = matcher(key, "auto")
    assert takes(start, "I would rather talk.")
    text = detector.render(WRITTEN[:1])
    assert takes(start, f"Well. {text}")
    assert not takes(start, f"Well. {detector.render([Call('other', {})])}")
    wrong = detector.render([Call("get_weather", {"days": 3})])
    assert not takes(start, f"Well. {wrong}"), "an argument that is required is missing"


LIMITED = tool(
    "order",
    code={"type": "string", "pattern": "^[A-Z]{2}[0-9]+$", "maxLength": 6},
    note={"type": "string", "minLength": 2, "maxLength": 4},
    has={"type": "string", "pattern": "<b>|서울"},
    day={"type": "string", "format": "date"},
    size={"$ref": "#/$defs/Size"},
    fixed={"const": "a&b"},
    either={"anyOf": [{"type": "string", "maxLength": 1}, {"type": "string", "pattern": "^xyz"}]},
    count={"type": "integer", "minimum": 3, "maximum": 12},
    colour={"anyOf": [{"$ref": "#/$defs/Size"}, {"type": "null"}]},
)
LIMITED["function"]["parameters"]["$defs"] = {"Size": {"type": "string", "enum": ["small", "large"]}}
TAKEN = {
    "code": (["AB1", "ZZ9999"], ["AB", "AB12345", "xAB1", "AB1 "]),
    "note": (["ab", "서울서울"], ["a", "abcde", ""]),
    "has": (["서울", "in 서울!"], ["Seoul", ""]),
    "day": (["2026-02-28"], ["2026-02-30", "today"]),
    "size": (["small"], ["medium", ""]),
    "fixed": (["a&b"], ["a", "a&amp;b"]),
    "either": (["", "q", "xyz and more"], ["qq", "wxyz"]),
    "count": ([3, 12], [2, 13, 100]),
}


@pytest.mark.parametrize("key", KEYS)
def test_the_schema_of_an_argument_is_kept(key: str) -> None:
    """Where texts are written without quotes as well."""
    detector, tools = detector_of(key), tools_of([LIMITED])
    made = structure_constraint(detector, tools, "required")
    assert made is not None
    start = BACKEND.compile(Constraint(made.kind, json.dumps(made.spec)))
    render = detector_of(made.key or key).render
    for name, (taken, refused) in TAKEN.items():
        for values, wanted in ((taken, True), (refused, False)):
            for one in values:
                text = render([Call("order", {name: one})]).removeprefix("<|start|>assistant")
                assert takes(start, text) == wanted, text
    # Of what a text must hold somewhere, a completion is not always found.
    given = {name: one for name, one in tools[0].parameters["properties"].items() if name != "has"}
    tools = (Tool("order", {**tools[0].parameters, "properties": given}),)
    made = structure_constraint(detector, tools, "required")
    assert made is not None
    start = BACKEND.compile(Constraint(made.kind, json.dumps(made.spec)))
    parser = FunctionCallParser(tools, made.key or key)
    for seed in range(3):
        content, calls = walked(start, parser, random.Random(f"{key} {seed}"))
        assert not content.strip()
        for _, arguments in calls:
            jsonschema.validate(arguments, tools[0].parameters)


def test_a_text_that_nothing_can_be_is_refused() -> None:
    nothing = tools_of([tool("f", a={"type": "string", "minLength": 3, "maxLength": 2})])
    made = structure_constraint(detector_of("qwen3_coder"), nothing, "required")
    assert made is not None
    with pytest.raises(BadRequest, match="maxLength 2 is less than minLength 3"):
        BACKEND.compile(Constraint(made.kind, json.dumps(made.spec)))


@pytest.mark.parametrize("key", KEYS)
def test_calls_or_json(key: str) -> None:
    schema = {"type": "object", "properties": {"sky": {"type": "string"}}, "required": ["sky"]}
    detector = detector_of(key)
    made = calls_or_json(detector, TOOLS, False, schema)
    if made is None:
        assert structure_constraint(detector, TOOLS, "required").kind == "json_schema"
        return
    start = BACKEND.compile(Constraint(made.kind, json.dumps(made.spec)))
    assert takes(start, '{"sky": "sun"}')
    text = detector.render(WRITTEN[:1]).removeprefix("<|start|>assistant")
    assert takes(start, text)
    assert not takes(start, f'{text}{{"sky": "sun"}}')
    assert not takes(start, '{"sky": 5}')
    assert not takes(start, "I would rather talk.")


def test_strict_tools_alone_make_auto_strict() -> None:
    strict = [Tool("ping", strict=True), Tool("pong")]
    assert structure_constraint(detector_of("qwen"), strict, "auto") is not None
    assert structure_constraint(detector_of("qwen"), [Tool("pong")], "auto") is None
    assert structure_constraint(detector_of("qwen"), strict, "none") is None


def test_errors_of_a_choice() -> None:
    for tools, choice, told in (
        ([], "required", "Tools cannot be empty if tool choice is set to required."),
        ([], "=x", "Tools cannot be empty if tool choice is set to a specific tool."),
        (TOOLS, "=x", "Tool 'x' not found in tools list."),
    ):
        with pytest.raises(BadRequest) as error:
            structure_constraint(None, tools, choice)
        assert error.value.message == told


def test_calls_as_json() -> None:
    assert calls_schema(TOOLS[2:], parallel=False) == {
        "type": "array",
        "minItems": 1,
        "maxItems": 1,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "enum": ["ping"]},
                "parameters": {"type": "object", "properties": {}},
            },
            "required": ["name", "parameters"],
        },
    }
    shared = {
        "$defs": {"d": {"type": "string"}},
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/d"}},
    }
    made = calls_schema([Tool("a", shared), Tool("b", shared)], parallel=True)
    assert made["$defs"] == shared["$defs"]
    assert "maxItems" not in made
    with pytest.raises(BadRequest, match="Tool definition 'd' has multiple schemas"):
        calls_schema([Tool("a", shared), Tool("b", {"$defs": {"d": {}}})], parallel=True)


OLDER = {
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>N\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>",
    ),
    "deepseekv31": (
        "<｜tool▁call▁begin｜>N<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>"
    ),
    "deepseekv32": ('<｜DSML｜invoke name="N">', "</｜DSML｜invoke>", "<｜DSML｜invoke"),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.N:0<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_calls_section_begin|>",
    ),
    "llama3": ('<|python_tag|>{"name":"N", "arguments":', "}", "<|python_tag|>"),
    "mistral": ('[TOOL_CALLS] [{"name":"N", "arguments":', "}]", "[TOOL_CALLS]"),
    "qwen": ('<tool_call>\n{"name":"N", "arguments":', "}\n</tool_call>", "<tool_call>"),
    "qwen25": ('<tool_call>\n{"name":"N", "arguments":', "}\n</tool_call>", "<tool_call>"),
    "trinity": ('<tool_call>\n{"name":"N", "arguments":', "}\n</tool_call>", "<tool_call>"),
    "interns1": (
        '<|action_start|> <|plugin|>\n{"name": "N", "parameters": ', "}<|action_end|>",
        "<|action_start|> <|plugin|>",
    ),
    "hermes": ('<tool_call>{"name":"N", "arguments":', "}</tool_call>", "<tool_call>"),
}  # fmt: skip
NONE = ["glm", "glm45", "glm47", "lfm2", "mimo", "pythonic", "qwen3_coder", "step3", "step3p5", "minimax-m2",
        "gigachat3", "gemma4"]  # fmt: skip


def test_the_older_form_of_each_format() -> None:
    for key, wanted in OLDER.items():
        info = detector_of(key).structure_info("N")
        assert info is not None
        assert (info.begin, info.end, info.trigger) == wanted, key
    for key in NONE:
        assert detector_of(key).structure_info("N") is None, key
