"""The work of a tool-call format is linear in the text, whatever the text: counted, not timed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from runtime.formats.tools import FORMATS, FunctionCallParser
from runtime.formats.tools.reader import Reader
from runtime.formats.tools.types import Call
from tests.unit.runtime.formats.tools.calling import TOOLS, Parsed, added, whole

SIZE = 400
MOST = 9.0
"""Calls of functions per character: a million characters are read in about a second of a slow machine."""
ANYWHERE = ["<", "[", "{", "[f(", "[ping(a=", '{"name": "', " ", "\n", "</", '"', "\\", "a "]
INSIDE = [
    "a", "\n", " ", '"', "\\\\", "</parameter>", "<parameter=x", '<parameter name="x', "</function>",
    "</arg_value>", "<arg_key>", "</invoke>", "</tool_call>", "<|tool_call>",
]  # fmt: skip
WITHIN = ["1,", '"a",', "[", '{"a":', '{"a":1,"b":2},']


def texts(parser: FunctionCallParser, size: int) -> Iterator[str]:
    """Pieces of what the format writes, and of what it could be confused by, again and again."""
    detector = parser.detector
    one = detector.render([Call("get_weather", {"city": "x", "days": 3})])
    other = detector.render([Call("other", {"a": 1})])
    for piece in (*detector.triggers, *ANYWHERE, one, other, one[: len(one) * 2 // 3]):
        yield piece * (size // len(piece) + 1)
    for call, inside in (
        (Call("search", {"query": "@@@@", "tags": ["a"]}), INSIDE),
        (Call("mixed", {"items": ["@@@@"]}), WITHIN),
    ):
        before, after = detector.render([call]).replace('"@@@@"', "@@@@").split("@@@@")
        for piece in inside:
            yield before + piece * (size // len(piece) + 1)
            yield before + piece * ((size - len(after)) // len(piece)) + after


def calls_in(
    parse: Callable[[FunctionCallParser, str], Parsed], parser: FunctionCallParser, text: str
) -> int:
    """How many functions are called, and generators resumed."""
    count = 0

    def told(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(told)
    try:
        parse(parser, text)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("key", FORMATS.names())
def test_twice_the_text_is_twice_the_work(key: str) -> None:
    parser = FunctionCallParser(TOOLS, key)
    for half, all_of_it in zip(texts(parser, SIZE), texts(parser, 2 * SIZE), strict=True):
        for parse in (whole, in_pieces):
            small, large = calls_in(parse, parser, half), calls_in(parse, parser, all_of_it)
            assert large <= 2.4 * small + 400, half[:80]
            assert large <= MOST * len(all_of_it) + 400, half[:80]


def in_pieces(parser: FunctionCallParser, text: str) -> Parsed:
    return added(parser, [text[at : at + 64] for at in range(0, len(text), 64)])


class Counting(Reader):
    """copied: characters that were copied to put a piece behind what is here."""

    copied = 0

    def _join(self) -> None:
        super()._join()
        Counting.copied += len(self.text)


@pytest.mark.parametrize("key", FORMATS.names())
@pytest.mark.parametrize("blank", [" ", "\n"])
def test_what_is_held_is_not_copied_with_every_piece(
    key: str, blank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.formats.tools.parser.Reader", Counting)
    parser = FunctionCallParser(TOOLS, key)
    written = parser.detector.render([Call("ping", {})])
    for at in (len(written), len(written) // 2, len(parser.detector.triggers[0])):
        text = written[:at] + blank * 10_000 + "x"
        Counting.copied = 0
        found = added(parser, [text[at : at + 8] for at in range(0, len(text), 8)])
        assert Counting.copied < 40 * len(text)
        assert found == whole(parser, text)
