"""Reasoning and answer taken apart: whole, and the same in pieces of any size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.formats.reasoning.marks import REASONING_TYPES, ReasoningType, reasoning_type
from runtime.formats.reasoning.splitter import AnySplitter, split_reasoning, splitter_of
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


CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
TO = "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"
ANALYSIS = "<|channel|>analysis<|message|>{}<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>{}<|return|>"
SECTION = "<|tool_calls_section_begin|>x"


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "answer"),
    [
        ("qwen3", f"<think>so {CALL}", "so", CALL),
        ("glm45", f"<think>so</think>{CALL}", "so", CALL),
        ("nemotron_3", "<think>so</think>a", "so", "a"),
        ("kimi_k2", f"so{SECTION}", "so", SECTION),
        ("kimi", "◁think▷so◁/think▷a", "so", "a"),
        ("kimi_k3", "so<|close|>think<|sep|><|open|>response<|sep|>a<|close|>response<|sep|>", "so", "a"),
        ("minimax", "so</think>a", "so", "a"),
        ("minimax-m3", "<mm:think>so</mm:think>a", "so", "a"),
        ("minimax-append-think", "so</think>a", "", "<think>so</think>a"),
        ("step3", "so</think>a", "so", "a"),
        ("hunyuan", "<think>\nso\n</think>\n<answer>\na\n</answer>", "so", "\na\n"),
        ("cohere_command4", "<|START_THINKING|>so<|END_THINKING|><|START_TEXT|>a<|END_TEXT|>", "so", "a"),
        ("cohere_command4", "<|START_TEXT|>a<|END_TEXT|>", "", "a"),
        ("gemma4", "<|channel>thought\nso<channel|>a", "so", "a"),
        ("apertus2509", "<|inner_prefix|>so<|tools_prefix|>[]", "so", "<|tools_prefix|>[]"),
        ("mistral", "[THINK]so[/THINK]a", "so", "a"),
        (
            "inkling",
            "<|message_model|><|content_thinking|>so<|end_message|>"
            "<|message_model|><|content_text|>a<|end_message|><|content_model_end_sampling|>",
            "so",
            "a",
        ),
        ("gpt-oss", ANALYSIS.format("so") + FINAL.format("a"), "so", "a"),
        (
            "gpt-oss",
            ANALYSIS.format("so") + TO + ANALYSIS.format("then") + FINAL.format("a"),
            "so\nthen",
            TO + "a",
        ),
        ("gpt-oss", "<|channel|>commentary<|message|>first<|end|>" + TO, "", "first" + TO),
        ("gpt-oss", "analysisso, soassistantfinala", "so, so", "a"),
        ("gpt-oss", "<|channel|>analysis<|message|>cut o", "cut o", ""),
        ("gpt-oss", "a <|channel|> b", "", "a <|channel|> b"),
        ("gpt-oss", "plain", "", "plain"),
    ],
)
def test_families(name: str, text: str, reasoning: str, answer: str) -> None:
    kind = reasoning_type(name)
    found = split_reasoning(text, kind)
    assert (found.reasoning, found.answer) == (reasoning, answer)
    for at in range(len(text) + 1):
        assert added(splitter_of(kind), [text[:at], text[at:]]) == (reasoning, answer)
    assert added(splitter_of(kind), list(text)) == (reasoning, answer)


def added(splitter: AnySplitter, pieces: list[str]) -> tuple[str, str]:
    told = [*map(splitter.feed, pieces), splitter.end()]
    return "".join(thought for thought, _ in told), "".join(answer for _, answer in told)


@given(st.sampled_from(list(REASONING_TYPES)), st.data())
def test_any_split_of_any_family_gives_the_same(name: str, data: st.DataObject) -> None:
    kind = REASONING_TYPES[name]
    marks = [kind.marks.open, kind.marks.close, *kind.marks.ends, *kind.marks.dropped, *CONTROLS]
    cut = [mark[: len(mark) // 2] for mark in marks]
    parts = data.draw(st.lists(st.sampled_from([*marks, *cut, "a", " ", "\n", "analysis", "<"]), max_size=12))
    text = "".join(parts)
    found = split_reasoning(text, kind)
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert added(splitter_of(kind), pieces) == (found.reasoning, found.answer)
    assert added(splitter_of(kind), list(text)) == (found.reasoning, found.answer)


CONTROLS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "final", " to=functions.f"]
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
