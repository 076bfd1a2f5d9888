"""A reply cut into reasoning and content: whole, and as it grows under any chunking."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.formats.reasoning.marks import ReasoningMarks
from runtime.protocol.io_struct import GenerateOutput
from runtime.server.reasoning import Splitter, split

MARKS = ReasoningMarks("<think>", "</think>")


def output(text: str, start: int | None, *, ended: bool, constrained: bool = True) -> GenerateOutput:
    meta = {"answer_start": start, "finish_reason": {"type": "stop"} if ended else None}
    return GenerateOutput(text, [], meta | ({"grammar": {}} if constrained else {}))


def at(text: str) -> int | None:
    found = text.find("</think>")
    return None if found < 0 else found + len("</think>")


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nso\n</think> {}", "so", " {}"),
        ("so</think>{}", "so", "{}"),
        ("</think>{}", "", "{}"),
        ("<think>so </th", "so </th", ""),
        ("", "", ""),
        ("<thi", "<thi", ""),
    ],
)
def test_whole(text, reasoning, content):
    assert split(output(text, at(text), ended=True), MARKS) == (reasoning, content)


def test_without_reasoning_all_is_content():
    plain = GenerateOutput("a</think>b", [], {"finish_reason": {"type": "stop"}})
    assert split(plain, MARKS) == (None, "a</think>b")
    assert Splitter(None).news(plain) == ("", "a</think>b")


def test_free_text_loses_the_blanks_after_the_mark():
    assert split(output("a</think>\n\nb", 9, ended=True, constrained=False), MARKS).content == "b"


pieces = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "/th", "ink>", " ", "\n", "a", "{}", "</"]), max_size=9
)


@settings(deadline=None)
@given(pieces, st.data())
def test_streamed_is_the_whole_in_pieces(words, data):
    text = "".join(words)
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    cut = Splitter(MARKS)
    reasoning = content = ""
    for end in ends:
        news = cut.news(output(text[:end], at(text[:end]), ended=False))
        reasoning, content = reasoning + news[0], content + news[1]
    news = cut.news(output(text, at(text), ended=True))
    whole = split(output(text, at(text), ended=True), MARKS)
    assert (reasoning + news[0], content + news[1]) == whole
