"""Every tool-call format: what models write, whole and by any split of it."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.formats.tools import FORMATS, FunctionCallParser
from runtime.formats.tools.tagged import TaggedCalls
from runtime.formats.tools.types import Call
from tests.unit.runtime.formats.tools import calling
from tests.unit.runtime.formats.tools.calling import TOOLS, added, calls_of, every_split, whole

ONE = '{"city": "서울", "days": 3}'
TWO = '{"query": "a \\"b\\" <c>", "tags": ["x", "y"]}'
WANTED = [("get_weather", json.loads(ONE)), ("search", json.loads(TWO))]
SEARCHED = 'a "b" <c>'
LISTED = '["x", "y"]'


def objects(arguments: str = "arguments") -> tuple[str, str]:
    return (
        f'{{"name": "get_weather", "{arguments}": {ONE}}}',
        f'{{"name": "search", "{arguments}": {TWO}}}',
    )


def tagged(opener: str, closer: str, argument: str, between: str = "\n") -> tuple[str, str]:
    """`opener` and `argument` take names and values in braces."""
    one = [
        opener.format("get_weather"),
        argument.format("city", "서울"),
        argument.format("days", "3"),
        closer,
    ]
    two = [
        opener.format("search"),
        argument.format("query", SEARCHED),
        argument.format("tags", LISTED),
        closer,
    ]
    return between.join(one), between.join(two)


A, B = objects()
P, Q = objects("parameters")
CALLS = f'get_weather(city="서울", days=3), search(query={SEARCHED!r}, tags={LISTED})'
V3_2 = [
    '<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="city" string="true">서울</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n',
    '<｜DSML｜invoke name="search">\n'
    f'<｜DSML｜parameter name="query" string="true">{SEARCHED}</｜DSML｜parameter>\n'
    f'<｜DSML｜parameter name="tags" string="false">{LISTED}</｜DSML｜parameter>\n</｜DSML｜invoke>\n',
]
GLM = tagged("<tool_call>{}", "</tool_call>", "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>")
GLM_47 = tagged("<tool_call>{}", "</tool_call>", "<arg_key>{}</arg_key><arg_value>{}</arg_value>", "")
MIMO = tagged("<function={}>", "</function>", "<parameter={}>{}</parameter>")
CODER = tagged("<function={}>", "</function>", "<parameter={}>\n{}\n</parameter>")
STEP = tagged(
    '<steptml:invoke name="{}">',
    "</steptml:invoke>",
    '<steptml:parameter name="{}">{}</steptml:parameter>',
    "",
)
MINIMAX = tagged('<invoke name="{}">', "</invoke>", '<parameter name="{}">{}</parameter>')
TOOL_CALL = "<tool_call>\n{}\n</tool_call>\n<tool_call>\n{}\n</tool_call>"
SECTION = "<|tool_calls_section_begin|>{}<|tool_calls_section_end|>"
KIMI = "<|tool_call_begin|>functions.{}:{}<|tool_call_argument_begin|>{}<|tool_call_end|>"
TO = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
STEP_CALL = "<｜tool_call_begin｜>function<｜tool_sep｜>{}<｜tool_call_end｜>\n"

WRITTEN: dict[str, list[str]] = {
    "deepseekv3": [
        "Hi.<｜tool▁calls▁begin｜>"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ONE}\n```<｜tool▁call▁end｜>\n"
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n{TWO}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "deepseekv31": [
        f"Hi.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ONE}<｜tool▁call▁end｜>"
        f"<｜tool▁call▁begin｜>search<｜tool▁sep｜>{TWO}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ],
    "deepseekv32": [
        f"Hi.\n\n<｜DSML｜function_calls>\n{''.join(V3_2)}</｜DSML｜function_calls>",
        "Hi." + "".join(V3_2),
        f'Hi.<｜DSML｜function_calls><｜DSML｜invoke name="get_weather">{ONE}</｜DSML｜invoke>'
        f'<｜DSML｜invoke name="search">{TWO}</｜DSML｜invoke></｜DSML｜function_calls>',
    ],
    "glm": ["Hi." + "".join(GLM), "Hi." + "\n".join(GLM), "Hi." + "".join(GLM).replace("\n", "\\n")],
    "glm45": ["Hi." + "".join(GLM)],
    "glm47": ["Hi." + "".join(GLM_47)],
    "gpt-oss": [
        "<|channel|>analysis<|message|>think<|end|><|start|>assistant<|channel|>commentary<|message|>Hi.<|end|>"
        f"<|start|>assistant{TO.format('get_weather', ONE)}<|start|>assistant{TO.format('search', TWO)}",
        "<|channel|>final<|message|>Hi.<|end|><|start|>assistant to=functions.get_weather"
        f"<|channel|>commentary<|message|>{ONE}<|call|>commentary"
        f"<|start|>assistant{TO.format('search', TWO)}<|return|>",
    ],
    "kimi_k2": [
        "Hi." + SECTION.format(KIMI.format("get_weather", 0, ONE) + KIMI.format("search", 1, TWO)),
        "Hi."
        + SECTION.format((KIMI.format("", 0, ONE) + KIMI.format("", 1, TWO)).replace("functions.:", "")),
    ],
    "lfm2": [
        f"Hi.<|tool_call_start|>[{CALLS}]<|tool_call_end|>",
        f"Hi.<|tool_call_start|>[{A}, {B}]<|tool_call_end|>",
    ],
    "llama3": [
        f"Hi.<|python_tag|>{P};{Q}",
        f"Hi.<|python_tag|>{P}; <|python_tag|>{Q}",
        f"Hi.{P};{Q}",
        "Hi.<|python_tag|>{'name': 'get_weather', 'parameters': {'city': '서울', 'days': 3}}; " + Q,
    ],
    "mimo": [
        "Hi." + TOOL_CALL.format(*MIMO),
        "Hi." + TOOL_CALL.format(MIMO[0], MIMO[1].replace("<c>", "&lt;c&gt;")),
    ],
    "mistral": [
        f"Hi.[TOOL_CALLS] [{A}, {B}]",
        f"Hi.[TOOL_CALLS]get_weather[ARGS]{ONE}[TOOL_CALLS]search[ARGS]{TWO}",
    ],
    "pythonic": [f"Hi.[{CALLS}]", f"Hi.<|python_start|>[{CALLS}]<|python_end|>"],
    "qwen": ["Hi.\n" + TOOL_CALL.format(A, B), f"Hi.<tool_call>{A}</tool_call><tool_call>{B}"],
    "qwen25": ["Hi.\n" + TOOL_CALL.format(A, B)],
    "qwen3_coder": [
        "Hi." + TOOL_CALL.format(*CODER),
        "Hi." + TOOL_CALL.format(*CODER).replace("\n</parameter>", ""),
        "Hi." + TOOL_CALL.format(*CODER).replace("\n</function>", ""),
    ],
    "step3p5": ["Hi." + TOOL_CALL.format(*CODER)],
    "step3": [
        f"Hi.<｜tool_calls_begin｜>\n{STEP_CALL.format(STEP[0])}{STEP_CALL.format(STEP[1])}<｜tool_calls_end｜>"
    ],
    "minimax-m2": [f"Hi.<minimax:tool_call>\n{MINIMAX[0]}\n{MINIMAX[1]}\n</minimax:tool_call>"],
    "trinity": ["<think>Hi.</think>\n" + TOOL_CALL.format(A, B)],
    "interns1": [
        f"Hi.<|action_start|> <|plugin|>\n{P}<|action_end|>\n<|action_start|> <|plugin|>\n{Q}<|action_end|>"
    ],
    "hermes": [
        f"Hi.<tool_call>{A}</tool_call><tool_call>{B}</tool_call>",
        f"Hi.<tool_call>[{A}, {B}]</tool_call>",
    ],
    "gemma4": [
        'Hi.<|tool_call>call:get_weather{city:<|"|>서울<|"|>,days:3}<tool_call|>'
        f'<|tool_call>call:search{{query:<|"|>{SEARCHED}<|"|>,tags:[<|"|>x<|"|>,<|"|>y<|"|>]}}<tool_call|>'
    ],
    "hunyuan": [f"Hi.<tool_calls>[{A}, {B}]</tool_calls>"],
    "cohere-command": [
        'Hi.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        + ONE
        + "},\n"
        '    {"tool_call_id": "1", "tool_name": "search", "parameters": ' + TWO + "}\n]<|END_ACTION|>"
    ],
    "granite": [f"Hi.<|tool_call|>[{A}, {B}]", f"Hi.<tool_call>[{A}, {B}]"],
    "granite4": ["Hi.\n" + TOOL_CALL.format(A, B)],
    "phi-4": [f"Hi.<|tool_call|>[{A}, {B}]<|/tool_call|>", f"Hi.functools[{A}, {B}]"],
    "olmo-3": [f"Hi.\n<function_calls>\n{CALLS.replace('), ', ')' + chr(10))}\n</function_calls>"],
    "minicpm": [
        f"Hi.<|tool_call_start|>\n```python\n{CALLS.replace('), ', ')' + chr(10))}\n```\n<|tool_call_end|>"
    ],
    "mistral-compact": [f"Hi.[TOOL_CALLS]get_weather[ARGS]{ONE}[TOOL_CALLS]search[ARGS]{TWO}"],
}
CASES = [(key, text) for key, texts in WRITTEN.items() for text in texts]


def same_by_any_split(parser: FunctionCallParser, text: str) -> calling.Parsed:
    """Whole, and by every split, and by single characters."""
    wanted = whole(parser, text)
    assert added(parser, text) == wanted
    for pieces in every_split(text):
        assert added(parser, pieces) == wanted, pieces
    return wanted


@pytest.mark.parametrize(("key", "text"), CASES)
def test_two_calls(key: str, text: str) -> None:
    found = same_by_any_split(FunctionCallParser(TOOLS, key), text)
    assert found[0] == "Hi."
    assert calls_of(found) == WANTED
    assert [index for index, _, _ in found[1]] == [0, 1]


ALIASES = [
    *((key, text.replace("｜", "|")) for key in ("deepseekv3", "deepseekv31") for text in WRITTEN[key]),
    *(("deepseekv32", text) for text in WRITTEN["deepseekv31"]),
    *(
        ("gemma4", text.replace("<|tool_call>", "<|tool_call|>").replace("<tool_call|>", "<|tool_call|>"))
        for text in WRITTEN["gemma4"]
    ),
]


@pytest.mark.parametrize(("key", "text"), ALIASES)
def test_how_documents_write_the_marks(key: str, text: str) -> None:
    found = same_by_any_split(FunctionCallParser(TOOLS, key), text)
    assert (found[0], calls_of(found)) == ("Hi.", WANTED)


def test_one_call_of_gigachat() -> None:
    text = f"Hi.<|message_sep|>\n\nfunction call<|role_sep|>\n{A}</s>"
    found = same_by_any_split(FunctionCallParser(TOOLS, "gigachat3"), text)
    assert (found[0], calls_of(found)) == ("Hi.", WANTED[:1])


def test_every_format_has_its_texts() -> None:
    assert set(FORMATS.names()) == {*WRITTEN, "gigachat3"}


@pytest.mark.parametrize("key", FORMATS.names())
@given(st.data())
def test_random_calls(key: str, data: st.DataObject) -> None:
    parser = FunctionCallParser(TOOLS, key)
    written = data.draw(calling.calls(texts_of(key)))[: 1 if key == "gigachat3" else 5]
    before, after = data.draw(CONTENT), data.draw(CONTENT)
    text = before + parser.detector.render(written) + (f"\n{after}" if written else "")
    found = whole(parser, text)
    assert calls_of(found) == [(call.name, call.arguments) for call in written]
    if written:
        assert found[0] == before.rstrip() + (f"\n{after}" if after else "")
    assert added(parser, text) == found
    assert added(parser, data.draw(calling.cuts(text))) == found


CONTENT = st.from_regex(r"[A-Za-z가-힣.,! ]{0,12}", fullmatch=True).map(str.strip)


def texts_of(key: str) -> st.SearchStrategy[str]:
    """Where an argument is written as it is, no text can be told apart that reads like the end of one."""
    if key == "gemma4":
        return calling.PLAIN
    detector = FunctionCallParser(TOOLS, key).detector
    if not isinstance(detector, TaggedCalls):
        return calling.AWKWARD
    begin, end = detector.begin.strip(), detector.end.strip()
    marks = (
        (detector.closer, (end, detector.opener, begin, detector.tail)),
        (detector.value_end, (detector.key_open, detector.closer, end, detector.filler)),
    )
    ends = [
        rf"{re.escape(mark)}\s*(?:{'|'.join(re.escape(one) for one in behind if one)})"
        for mark, behind in marks
        if mark
    ]
    end_of_one = re.compile("|".join(ends))
    return calling.AWKWARD.filter(lambda text: end_of_one.search(text) is None)


@pytest.mark.parametrize("key", FORMATS.names())
@pytest.mark.parametrize(
    "text", ["a <", "", "  ", "a\n", "[1, 2] a", '{"x": 1} and', "f(x) [", "<tool_", "x<|"]
)
def test_text_without_calls_is_content(key: str, text: str) -> None:
    assert same_by_any_split(FunctionCallParser(TOOLS, key), text) == (text, [])


@pytest.mark.parametrize("key", FORMATS.names())
def test_empty_arguments(key: str) -> None:
    parser = FunctionCallParser(TOOLS, key)
    text = parser.detector.render([Call("ping", {})])
    assert same_by_any_split(parser, text) == ("", [(0, "ping", "{}")])


@pytest.mark.parametrize("key", FORMATS.names())
def test_a_call_of_another_tool_is_content(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = FunctionCallParser(TOOLS, key)
    unknown = parser.detector.render([Call("other", {"a": 1})])
    text = unknown + ("" if key == "gigachat3" else "\n") + parser.detector.render([Call("ping", {})])
    content, calls = same_by_any_split(parser, text)
    assert calls == [(0, "ping", "{}")]
    assert "other" in content
    monkeypatch.setenv("SGLANG_FORWARD_UNKNOWN_TOOLS", "1")
    assert [call[:2] for call in same_by_any_split(parser, text)[1]] == [(-1, "other"), (0, "ping")]


def mutated() -> st.SearchStrategy[tuple[str, str]]:
    def change(given: tuple[tuple[str, str], list[tuple[int, int, str]]]) -> tuple[str, str]:
        (key, text), changes = given
        for at, count, new in changes:
            at %= len(text) + 1
            text = text[:at] + new + text[at + count :]
        return key, text

    piece = st.one_of(st.just(""), st.sampled_from(calling.MARKS), calling.PLAIN)
    change_one = st.tuples(st.integers(0, 1 << 16), st.integers(0, 8), piece)
    return st.tuples(st.sampled_from(CASES), st.lists(change_one, min_size=1, max_size=4)).map(change)


@given(mutated(), st.data())
def test_mutated_texts(given_text: tuple[str, str], data: st.DataObject) -> None:
    key, text = given_text
    parser = FunctionCallParser(TOOLS, key)
    found = whole(parser, text)
    assert added(parser, text) == found
    assert added(parser, data.draw(calling.cuts(text))) == found
    for _, name, arguments in found[1]:
        assert isinstance(json.loads(arguments), dict)
        assert any(tool["function"]["name"] == name for tool in TOOLS)
    if not found[1] and key not in ("gpt-oss", "trinity"):
        assert found[0] == text


@pytest.mark.parametrize(("key", "text"), CASES)
def test_without_tools_all_is_content(key: str, text: str) -> None:
    for tools in (None, []):
        parser = FunctionCallParser(tools, key)
        assert not parser.has_tool_call(text)
        assert whole(parser, text) == (text, [])
        assert added(parser, text) == (text, [])


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(ValueError, match=r"Unsupported tool_call_parser: nobody's; known: .*qwen25"):
        FunctionCallParser(TOOLS, "nobody's")
