"""Tools, calls and ways to cut a text, for the tests of tool-call formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from hypothesis import strategies as st

from runtime.formats.tools import FunctionCallParser
from runtime.formats.tools.types import Call

Parsed = tuple[str, list[tuple[int, str, str]]]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


TEXTS = {"type": "array", "items": {"type": "string"}}
TOOLS = [
    tool("get_weather", city={"type": "string"}, days={"type": "integer"}),
    tool("search", query={"type": "string"}, tags=TEXTS),
    tool(
        "mixed",
        text={"type": "string"},
        count={"type": "integer"},
        ratio={"type": "number"},
        on={"type": "boolean"},
        nothing={"type": "null"},
        items={"type": "array"},
        inner={"type": "object"},
    ),
    tool("ping"),
]


def added(parser: FunctionCallParser, pieces: Iterable[str]) -> Parsed:
    """What the pieces add up to. A call's name comes before its arguments, and the calls one by one."""
    content, calls = "", []
    for result in [*map(parser.parse_stream_chunk, pieces), parser.parse_stream_end()]:
        content += result.normal_text
        for item in result.calls:
            if item.name is not None:
                assert not item.parameters
                calls.append((item.tool_index, item.name, ""))
            else:
                index, name, text = calls[-1]
                assert item.tool_index == index
                calls[-1] = (index, name, text + item.parameters)
    return content, calls


def whole(parser: FunctionCallParser, text: str) -> Parsed:
    content, items = parser.parse_non_stream(text)
    return content, [(item.tool_index, str(item.name), item.parameters) for item in items]


def calls_of(parsed: Parsed) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for _, name, arguments in parsed[1]]


def every_split(text: str) -> Iterator[list[str]]:
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    """Random pieces of a text."""

    def cut(places: list[int]) -> list[str]:
        ends = sorted(places)
        return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]

    return st.lists(st.integers(0, len(text)), max_size=12).map(cut)


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "</parameter>",
    "<|call|>",
    "[TOOL_CALLS]",
    "```",
    "}",
    "]",
    '"',
    "\\",
    "'",
    "<",
]
PLAIN = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
AWKWARD = st.lists(st.one_of(PLAIN, st.sampled_from(MARKS), st.just("\n")), max_size=4).map("".join)
NUMBERS = st.one_of(
    st.integers(-(10**15), 10**15), st.floats(allow_nan=False, allow_infinity=False, width=32)
)
KEYS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)


def values(texts: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    single = st.one_of(st.none(), st.booleans(), NUMBERS, texts)
    return st.recursive(
        single,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
        max_leaves=6,
    )


def calls(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[Call]]:
    inner = values(texts)
    arguments = {
        "get_weather": {"city": texts, "days": st.integers(-99, 99)},
        "search": {"query": texts, "tags": st.lists(texts, max_size=3)},
        "mixed": {
            "text": texts,
            "count": st.integers(-(10**12), 10**12),
            "ratio": st.one_of(st.integers(-9, 9), st.floats(-1e6, 1e6, width=32)),
            "on": st.booleans(),
            "nothing": st.none(),
            "items": st.lists(inner, max_size=3),
            "inner": st.dictionaries(KEYS, inner, max_size=3),
        },
        "ping": {},
    }
    one = st.one_of(
        st.fixed_dictionaries({}, optional=optional).map(lambda found, name=name: Call(name, found))
        for name, optional in arguments.items()
    )
    return st.lists(one, max_size=5)
