"""A generated text cut where its tokens meet, whatever they are said to be."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from sglang_dsl.views.tokens import Token, spans, tokens_of


def of(*texts: str) -> list[Token]:
    return [Token(text, -0.1) for text in texts]


def cut(text: str, tokens: list[Token], skip: int = 0) -> list[str]:
    return [span.text for span in spans(text, tokens, skip)]


@given(st.lists(st.text(min_size=1, max_size=5), max_size=12))
def test_tokens_that_are_characters_have_their_own(texts: list[str]) -> None:
    made = spans("".join(texts), of(*texts))
    assert [span.text for span in made] == texts
    assert [[token.text for token in span.tokens] for span in made] == [[text] for text in texts]


@given(st.text(max_size=30), st.lists(st.integers(0, 60), max_size=20), st.integers(0, 10))
def test_tokens_that_are_bytes_add_up_to_the_text(text: str, at: list[int], skip: int) -> None:
    data = text.encode("utf-8", "surrogatepass")
    ends = sorted({0, len(data), *(place for place in at if place < len(data))})
    pieces = [data[a:b].decode("utf-8", "replace") for a, b in itertools.pairwise(ends)]
    assert "".join(cut(text, of(*pieces), skip)) == text[skip:]


@given(st.text(max_size=30), st.lists(st.text(max_size=6), max_size=12), st.integers(0, 10))
def test_whatever_is_told_the_text_stays_whole(text: str, told: list[str], skip: int) -> None:
    assert "".join(cut(text, of(*told), skip)) == text[skip:]


def test_a_character_of_several_tokens_is_one_span() -> None:
    pieces = ["a", " \ufffd", "\ufffd", "\ufffd", " b"]
    made = spans("a 🦙 b", of(*pieces))
    assert [span.text for span in made] == ["a", " 🦙", " b"]
    assert len(made[1].tokens) == 3
    assert math.isclose(made[1].probability or 0, math.exp(-0.3))


def test_special_tokens_stripped_spaces_and_what_was_cut_off() -> None:
    assert cut("Hello there", of("<think>", "</think>", "Hello", " there", "<|im_end|>")) == [
        "Hello",
        " there",
    ]
    assert cut("Hello there", of(" Hello", " there")) == ["Hello", " there"]
    assert cut("there", of("hidden ", "the", "re"), 0) == ["the", "re"]
    assert cut("hidden there", of("hidden ", "the", "re"), 7) == ["the", "re"]
    assert cut("ab", of("a", "bSTOP")) == ["a", "b"]


def test_what_backends_tell() -> None:
    meta = {
        "output_token_logprobs": [[-0.5, 7, "a"], [None, 8, "b"]],
        "output_top_logprobs": [[[-0.5, 7, "a"], [-2.0, 9, "c"]], []],
        "output_token_origins": ["forced", "sampled"],
    }
    first, second = tokens_of(meta)
    assert (first.origin, first.others) == ("forced", (("a", -0.5), ("c", -2.0)))
    assert (second.logprob, second.probability, second.others) == (None, None, ())
    assert tokens_of({"output_token_logprobs": [[-0.5, 7, None]]}) == ()  # return_text_in_logprobs is off
    assert tokens_of({"output_token_logprobs": "odd"}) == ()
    assert tokens_of({}) == ()
