"""The transcript: immutable, shared, and cheap to extend."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.protocol.messages import Message
from sglang_dsl.conversation.transcript import Transcript

EMPTY = Transcript.EMPTY


def test_raw_text_is_one_open_raw_message() -> None:
    t = EMPTY.say("a").say(" b\n")
    assert t.text() == "a b\n"
    assert t.prompt().messages == (Message("raw", "a b\n", open=True),)
    assert t.prompt().plain_text == "a b\n"
    assert EMPTY.prompt().plain_text == ""


def test_turns_become_messages_verbatim() -> None:
    t = (
        EMPTY.open("system")
        .close()
        .say("x")
        .open("user")
        .say("  \n hi ")
        .close()
        .open("assistant")
        .say("Well")
    )
    assert t.messages() == (
        Message("system", ""),
        Message("raw", "x"),
        Message("user", "  \n hi "),
        Message("assistant", "Well", open=True),
    )
    assert t.prompt().plain_text is None
    assert t.prompt().messages[-1].open


def test_after_a_turn_a_generation_continues_empty_raw_text() -> None:
    t = EMPTY.open("user").say("hi").close()
    assert t.prompt().messages == (Message("user", "hi"), Message("raw", "", open=True))
    assert t.say("more").prompt().messages[-1] == Message("raw", "more", open=True)


def test_forks_share_and_do_not_see_each_other() -> None:
    base = EMPTY.open("user").say("q")
    left, right = base.say("1").close(), base.say("2").close()
    assert (left.text(base), right.text(base)) == ("1\n", "2\n")
    assert base.text() == "USER: q"
    assert left.entries()[0] is right.entries()[0]


def test_nesting_and_ending_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot start inside"):
        EMPTY.open("user").open("assistant")
    with pytest.raises(ValueError, match="no turn is open"):
        EMPTY.close()


ENTRIES = st.lists(
    st.one_of(st.text(), st.sampled_from([("open", "user"), ("open", "assistant"), ("close",)]))
)


@given(ENTRIES, ENTRIES)
def test_replay_says_the_same_again(first: list[object], second: list[object]) -> None:
    def build(t: Transcript, script: list[object]) -> Transcript:
        for step in script:
            match step:
                case str():
                    t = t.say(step)
                case ("open", role) if t.role is None:
                    t = t.open(role)
                case ("close",) if t.role is not None:
                    t = t.close()
        return t

    base = build(EMPTY, first)
    whole = build(base, second)
    again = whole.replay(base, since=base)
    assert again.text() == whole.text()
    assert again.messages() == whole.messages()
    assert len(whole.text()) == whole.length
    assert base.text() + whole.text(base) == whole.text()


def test_adding_takes_the_same_time_however_long_the_text_is() -> None:
    def build(count: int) -> tuple[Transcript, float]:
        t, began = EMPTY, time.thread_time()
        for _ in range(count):
            t = t.say("word ")
        return t, time.thread_time() - began

    build(5_000)
    short = min(build(10_000)[1] for _ in range(3))
    t, long = build(100_000)
    # Ten times the work; copying would make it a hundred times.
    assert long < 40 * short
    assert t.length == 500_000
    assert t.text() == "word " * 100_000
    del t  # a long chain goes without recursion
