"""A reply as events: whole, and the same events under any split of its text into deltas."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.formats.reasoning.marks import REASONING_TYPES, ReasoningMarks
from runtime.formats.reply import ContentDelta, ReasoningDelta, ReplyEvent, ReplyParser
from runtime.formats.tools import FunctionCallParser
from runtime.protocol.io_struct import OutputDelta
from tests.exploring import tries

MARKS = ReasoningMarks("<think>", "</think>")
UNTOLD = "untold"


def delta(text: str, start: int | str | None, *, ended: bool, constrained: bool = True) -> OutputDelta:
    meta = {"finish_reason": {"type": "stop"} if ended else None}
    if start != UNTOLD:
        meta["answer_start"] = start
    return OutputDelta(text, [], meta | ({"grammar": {}} if constrained else {}))


def whole(text: str, start: int | str | None, constrained: bool = True) -> ReplyParser:
    parser = ReplyParser(MARKS)
    parser.feed(delta(text, start, ended=True, constrained=constrained))
    return parser


def at(text: str) -> int | None:
    found = text.find("</think>")
    return None if found < 0 else found + len("</think>")


def joined(events: list[ReplyEvent]) -> list[ReplyEvent]:
    """Neighbours of one kind as one."""
    return [kind("".join(one.text for one in some)) for kind, some in groupby(events, type)]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>\nso\n</think> {}", "so", " {}"),
        ("so</think>{}", "so", "{}"),
        ("</think>{}", "", "{}"),
        ("<think>so </th", "so </th", ""),
        ("", "", ""),
        ("<thi", "<thi", ""),
        (" \n", "", ""),
    ],
)
def test_whole(text, reasoning, content):
    parser = whole(text, at(text))
    assert (parser.reasoning, parser.content) == (reasoning, content)
    events = [ReasoningDelta(reasoning)] if reasoning else []
    assert parser.events == events + ([ContentDelta(content)] if content else [])


def test_without_reasoning_all_is_content():
    for parser in (ReplyParser(), ReplyParser(MARKS)):
        parser.feed(delta("a</think>b", UNTOLD, ended=True))
        assert (parser.reasoning, parser.content) == (None, "a</think>b")
        assert parser.events == [ContentDelta("a</think>b")]


def test_free_text_loses_the_blanks_after_the_mark():
    assert whole("a</think>\n\nb", 9, constrained=False).content == "b"


def test_log_probabilities_always_have_an_event_to_go_with():
    parser = ReplyParser(MARKS)
    output = delta("", None, ended=False)
    output.meta["output_token_logprobs"] = [[-1.0, 5, "a"]]
    parser.feed(output)
    assert parser.events == [ContentDelta("")]
    assert parser.content == ""


def test_it_says_which_delta_is_the_first():
    parser = ReplyParser(MARKS)
    assert (parser.output, parser.meta) == (None, {})
    firsts = []
    for text in "abc":
        parser.feed(delta(text, UNTOLD, ended=False))
        firsts.append(parser.is_first)
    assert firsts == [True, False, False]


WORDS = st.lists(
    st.sampled_from(["<think>", "</think>", "<", "/th", "ink>", " ", "\n", "a", "{}", "</"]), max_size=9
)


@settings(deadline=None, max_examples=tries(400))
@given(words=WORDS, constrained=st.booleans(), data=st.data())
def test_any_split_gives_the_same_events(words, constrained, data):
    """Where the answer starts may be anywhere, and is told with its first character, or sooner."""
    text = "".join(words)
    start = data.draw(st.sampled_from([UNTOLD, None, at(text)]) | st.integers(0, len(text) + 2))
    lead = data.draw(st.integers(0, 3))
    expected = whole(text, start, constrained)
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parser, events = ReplyParser(MARKS), []
    for begin, end in pairwise([0, *ends, len(text)]):
        known = start if isinstance(start, int) and start <= end + lead else None
        told = UNTOLD if start == UNTOLD else known
        parser.feed(delta(text[begin:end], told, ended=False, constrained=constrained))
        events += parser.events
    parser.feed(delta("", start, ended=True, constrained=constrained))
    assert joined(events + parser.events) == expected.events
    assert (parser.reasoning, parser.content) == (expected.reasoning, expected.content)


KINDS = st.sampled_from([None, *REASONING_TYPES.values()])


@settings(deadline=None, max_examples=tries(300))
@given(
    words=WORDS, kind=KINDS, begun=st.sampled_from([True, False, None]), held=st.booleans(), data=st.data()
)
def test_reasoning_that_the_text_shows_is_the_same_by_any_split(words, kind, begun, held, data):
    marks = MARKS if kind is None else kind.marks
    mine = [marks.open, marks.close, *marks.ends, *marks.dropped]
    text = "".join(data.draw(st.sampled_from(mine)) if word == "</" else word for word in words)

    def parsed(pieces: list[str]) -> tuple[ReplyParser, list[ReplyEvent]]:
        parser, events = ReplyParser(marks, apart=True, kind=kind, held=held), []
        for at, piece in enumerate(pieces):
            output = delta(piece, UNTOLD, ended=at == len(pieces) - 1)
            if begun is not None:
                output.meta["reasoning_begun"] = begun
            parser.feed(output)
            events += parser.events
        return parser, joined(events)

    whole_reply, expected = parsed([text])
    ends = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[begin:end] for begin, end in pairwise([0, *ends, len(text)])]
    reply, events = parsed(pieces)
    assert (reply.reasoning, reply.content) == (whole_reply.reasoning, whole_reply.content)

    def reasoning_first(some: list[ReplyEvent]) -> list[ReplyEvent]:
        # As within one delta, also where content stands before the reasoning begins.
        return joined(sorted(some, key=lambda one: isinstance(one, ContentDelta)))

    assert reasoning_first(events) == reasoning_first(expected)
    if begun is False:
        assert (reply.reasoning, reply.content) == (None, text)


def test_held_reasoning_comes_in_one_piece_before_what_follows():
    parser = ReplyParser(MARKS, apart=True, held=True)
    told = []
    for piece in ("<think>a", "b", "</think>", "c", "d"):
        parser.feed(delta(piece, UNTOLD, ended=False))
        told.append(parser.events)
    assert told == [[], [], [], [ReasoningDelta("ab"), ContentDelta("c")], [ContentDelta("d")]]
    assert not parser.may_reason


def test_a_call_may_follow_the_reasoning_at_once_or_stand_in_it():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    for text in (f"<think>so</think>{call}", f"<think>so {call}"):
        calls = FunctionCallParser([{"name": "f"}], "qwen25")
        parser = ReplyParser(MARKS, calls, apart=True, kind=REASONING_TYPES["qwen3"])
        for at, piece in enumerate(text):
            parser.feed(delta(piece, UNTOLD, ended=at == len(text) - 1))
        assert (parser.reasoning, parser.content, parser.calls) == ("so", "", [["f", "{}"]])
