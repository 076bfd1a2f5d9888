"""Reasoning and answer taken apart: whole, and the same in pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.formats.reasoning.types import (
    REASONING_TYPES,
    ReasoningType,
    reasoning_type,
    split_reasoning,
    splitter_of,
)
from runtime.protocol.registry import UnknownName

QWEN, R1 = REASONING_TYPES["qwen3"], REASONING_TYPES["deepseek-r1"]
GRANITE = REASONING_TYPES["granite_thinking_parser"]


@pytest.mark.parametrize(
    ("kind", "text", "reasoning", "answer"),
    [
        (QWEN, "<think>\nhm, so\n</think>\n\nParis", "hm, so", "Paris"),
        (QWEN, "Paris", "", "Paris"),
        (QWEN, "  Paris </think> x", "", "  Paris </think> x"),
        (QWEN, "<think>\n\n</think>\n\nParis", "", "Paris"),
        (QWEN, "<think>never closed", "never closed", ""),
        (QWEN, "<thi", "", "<thi"),
        (QWEN, "", "", ""),
        (R1, "hm, so\n</think>\n\nParis", "hm, so", "Paris"),
        (R1, "<think>hm</think>Paris", "hm", "Paris"),
        (R1, "cut off", "cut off", ""),
        (R1, " \n", "", " \n"),
        (None, "[THINK]a[/THINK]b", "a", "b"),
        (None, "◁think▷a◁/think▷b", "a", "b"),
        (None, "plain", "", "plain"),
        (
            REASONING_TYPES["granite_thinking_parser"],
            "Here is my thought process: a\nHere is my response: b",
            "a",
            "b",
        ),
        (QWEN, "<think>a </thin b</think></think>c", "a </thin b", "</think>c"),
    ],
)
def test_known_texts(kind: ReasoningType | None, text: str, reasoning: str, answer: str) -> None:
    found = split_reasoning(text, kind)
    assert (found.reasoning, found.answer) == (reasoning, answer)
    assert found.head + found.answer == text or not found.answer


PIECES = st.sampled_from(
    ["<think>", "</think>", "<", "think", "</", ">", " ", "\n", "a", "é", "[THINK]", "[/THINK]"]
)


@given(st.lists(PIECES, max_size=14), st.sampled_from([QWEN, R1, None]), st.data())
def test_pieces_of_any_size_give_the_same(
    parts: list[str], kind: ReasoningType | None, data: st.DataObject
) -> None:
    text = "".join(parts)
    whole = split_reasoning(text, kind)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    splitter = splitter_of(kind)
    told = [splitter.feed(text[a:b]) for a, b in zip([0, *cuts], [*cuts, len(text)])]
    told.append(splitter.end())
    assert "".join(thought for thought, _ in told) == whole.reasoning
    assert "".join(answer for _, answer in told) == whole.answer
    assert splitter.head == whole.head
    assert (whole.head + whole.answer).strip() == text.strip()


def test_unknown_kinds_are_refused_with_the_known_ones() -> None:
    assert reasoning_type("auto") is None
    assert reasoning_type("qwen3") is QWEN
    with pytest.raises(UnknownName, match="known: auto, deepseek-r1"):
        reasoning_type("quen3")
