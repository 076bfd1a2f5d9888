"""Marks of reasoning: which ones a checkpoint has, and where the answer starts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.formats.reasoning.marks import KNOWN, ReasoningMarks, marks_of
from runtime.processes.frontend.output_accumulator import ReasoningBoundary
from runtime.protocol.errors import BadRequest


class Words:
    """A tokenizer of whole words: `added` have ids of their own, every other letter is one too."""

    def __init__(self, *added: str) -> None:
        self.added = {text: 1000 + number for number, text in enumerate(added)}

    def added_id(self, text: str) -> int | None:
        return self.added.get(text)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            mark = next((mark for mark in self.added if text.startswith(mark)), None)
            ids.append(ord(text[0]) if mark is None else self.added[mark])
            text = text[1 if mark is None else len(mark) :]
        return ids

    def decode(self, ids: Sequence[int], skip: bool = False) -> str:
        names = {number: "" if skip else text for text, number in self.added.items()}
        return "".join(names.get(token, chr(token) if token < 1000 else "") for token in ids)


def marks(tokenizer: Words, asked: str = "auto", templates: Sequence[str] = ()) -> ReasoningMarks | None:
    return marks_of(asked, tokenizer.added_id, tokenizer.encode, templates)


@pytest.mark.parametrize("known", KNOWN[:-1], ids=lambda known: known.close)
def test_a_tokenizer_with_the_tokens_says_it(known):
    found = marks(Words(known.open, known.close))
    assert (found.open, found.close, found.open_ids, found.close_ids) == (
        known.open, known.close, (1000,), (1001,),
    )  # fmt: skip


def test_a_sequence_that_begins_with_a_token_is_ids():
    found = marks(Words("<|channel|>", "<|message|>", "<|end|>", "<|start|>"), "<|channel|>final<|message|>")
    assert found.close_ids == (1000, *map(ord, "final"), 1001)
    assert {1002, 1003, *found.open_ids} == set(found.inside_ids)


def test_else_the_template_says_it_and_the_mark_is_text():
    assert marks(Words()) is None
    assert marks(Words(), templates=["{{ '</think>' }}"]) is None
    found = marks(Words(), templates=["{{ '<think>' }}{{ '</think>' }}"])
    assert (found.close, found.close_ids) == ("</think>", ())


def test_what_is_asked_for_wins():
    assert marks(Words("<think>", "</think>"), "none") is None
    own = marks(Words("<think>", "</think>"), "### Answer:")
    assert (own.open, own.close, own.close_ids) == ("", "### Answer:", ())
    with pytest.raises(BadRequest, match="reasoning_end"):
        marks(Words(), "")


def fed(boundary: ReasoningBoundary, text: str, ids: Sequence[int] = ()) -> ReasoningBoundary:
    boundary.feed(text, ids)
    return boundary


def test_the_answer_starts_after_the_ids_or_after_the_text():
    tokenizer = Words("<think>", "</think>")
    by_ids = marks(tokenizer)
    ids = [*tokenizer.encode("<think>so </th"), *map(ord, "ink> "), 1001, *tokenizer.encode("{}")]
    for skip in (False, True):
        text = tokenizer.decode(ids, skip)
        made = ReasoningBoundary(by_ids, lambda some, skip=skip: tokenizer.decode(some, skip), opened=True)
        assert text[fed(made, text, ids).answer_start :] == "{}"
        assert made.tokens == len(ids) - 2
    going_on = fed(ReasoningBoundary(by_ids, tokenizer.decode, opened=True), "so", ids[:5])
    assert (going_on.answer_start, going_on.tokens) == (None, 5)
    by_text = marks(Words(), "</think>")
    text = "so</think>{}</think>"
    made = fed(ReasoningBoundary(by_text, tokenizer.decode, opened=True), text, tokenizer.encode(text))
    assert text[made.answer_start :] == "{}</think>"
    assert made.tokens == 3
    assert fed(ReasoningBoundary(by_text, tokenizer.decode, opened=True), "so</thin").answer_start is None


@settings(deadline=None)
@given(
    words=st.lists(st.sampled_from(["<think>", "</think>", "</th", "ink>", " ", "a"]), max_size=8),
    opened=st.booleans(),
    as_text=st.booleans(),
    data=st.data(),
)
def test_the_boundary_is_the_same_however_the_output_comes(words, opened, as_text, data):
    """In any pieces, some of their last ids taken back and told again with the next."""
    tokenizer = Words() if as_text else Words("<think>", "</think>")
    found = marks(tokenizer, templates=["<think></think>"])
    text = "".join(words)
    ids = tokenizer.encode(text)
    whole = fed(ReasoningBoundary(found, tokenizer.decode, opened=opened), text, ids)
    pieces = ReasoningBoundary(found, tokenizer.decode, opened=opened)
    at = 0
    while at < len(ids):
        size = data.draw(st.integers(1, 3))
        back = data.draw(st.integers(0, 1)) if at else 0
        new = ids[at - back : at + size]
        pieces.feed(tokenizer.decode(ids[at : at + size]), new, back)
        at += size
    assert (pieces.answer_start, pieces.tokens) == (whole.answer_start, whole.tokens)


@pytest.mark.parametrize(
    ("ids", "wanted", "end"),
    [
        ([1, 2, 3], [2, 3], 3),
        ([1, 1, 2], [1, 2], 3),
        ([1, 2], [1, 2, 3], None),
        ([], [1], None),
        ([2, 1, 2], [1, 2], 3),
    ],
)
def test_the_end_of_the_marks_ids(ids, wanted, end):
    assert ReasoningMarks("", "", close_ids=tuple(wanted)).end_in(ids) == end


def test_prompts():
    found = ReasoningMarks("<think>", "</think>")
    assert found.opened_by("a<think>\n")
    assert not found.opened_by("a<think>\nb")
    assert found.closed_by("<think>\n\n</think>\n\n")
