"""Stop conditions, alone."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from runtime.protocol.io_struct import FinishReason
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.requests.stop import LENGTH, NOTHING_SEEN, STOP, Seen, StopRule, search_of

VOCABULARY = Vocabulary((b"<e>", b"a", b"b"), frozenset({0}), frozenset({0}))


def rule(**params: object) -> StopRule:
    return StopRule.of(SamplingParams(**params), VOCABULARY)  # type: ignore[arg-type]


def test_the_order() -> None:
    one = rule(max_new_tokens=3, stop_token_ids=(2,))
    assert one.finish(2, "x", 3, True) == FinishReason(type="stop", matched="x")
    assert one.finish(2, None, 3, True) == FinishReason(type="stop", matched=2)
    assert one.finish(0, None, 3, True) == FinishReason(type="stop", matched=0)
    assert one.finish(1, "x", 3, True) == FinishReason(type="stop", matched="x")
    assert one.finish(1, None, 3, True) == LENGTH
    assert one.finish(1, None, 2, True) == STOP
    assert one.finish(1, None, 2, False) is None


def test_ignore_eos_ignores_ids_and_not_strings() -> None:
    one = rule(ignore_eos=True, stop_token_ids=(2,), stop=("ab",))
    assert one.finish(0, None, 1, False) is None
    assert one.finish(2, None, 1, False) is None
    assert one.finish(2, "ab", 1, False) == FinishReason(type="stop", matched="ab")


def test_masked_until_min_new_tokens() -> None:
    one = rule(min_new_tokens=2, stop_token_ids=(2,))
    assert [one.masked_ids(produced) for produced in range(3)] == [{0, 2}, {0, 2}, frozenset()]
    assert rule(min_new_tokens=2, ignore_eos=True).masked_ids(0) == frozenset()


TEXT = st.text("abé", max_size=14)


@given(
    pieces=st.lists(TEXT.map(str.encode), max_size=8),
    stops=st.lists(TEXT.filter(bool), min_size=1, max_size=4),
)
def test_found_as_soon_as_complete_however_it_is_cut(pieces: list[bytes], stops: list[str]) -> None:
    one = rule(stop=tuple(stops))
    whole, seen = b"", NOTHING_SEEN
    for piece in pieces:
        found, seen = one.read(seen, piece)
        ends = []
        for stop in stops:
            at = (whole + piece).find(stop.encode())
            if at >= 0:
                ends.append((at + len(stop.encode()), -len(stop.encode()), stop))
        assert found == (min(ends)[2] if ends else None)
        if found:
            return
        whole += piece
        assert len(seen.tail) < max(len(stop.encode()) for stop in stops)


@given(text=TEXT, stops=st.lists(TEXT.filter(bool), min_size=1, max_size=4))
def test_the_same_string_for_any_tokens(text: str, stops: list[str]) -> None:
    one = rule(stop=tuple(stops))
    seen, found = NOTHING_SEEN, None
    for byte in text.encode():
        found, seen = one.read(seen, bytes([byte]))
        if found:
            break
    assert one.read(NOTHING_SEEN, text.encode())[0] == found


def read(one: StopRule, pieces: list[bytes]) -> tuple[int, str] | None:
    """(pieces read, what matched)"""
    seen = NOTHING_SEEN
    for count, piece in enumerate(pieces, 1):
        matched, seen = one.read(seen, piece)
        if matched is not None:
            return count, matched
    return None


PATTERNS = ("a+b", r"[^a]\w{2}", "é.", r"\Aab", r"b\b", "(?:ab|ba){2}")


@given(
    text=TEXT,
    cuts=st.lists(st.integers(0, 30), max_size=6),
    patterns=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=3),
)
def test_patterns_match_as_soon_as_re_does(text: str, cuts: list[int], patterns: list[str]) -> None:
    """Byte by byte, and in pieces that may end inside a character."""
    one = rule(stop_regex=tuple(patterns))
    data = text.encode()
    wanted = None
    for end in range(len(text) + 1):
        found = [match for pattern in patterns if (match := re.search(pattern, text[:end]))]
        if found:
            wanted = len(text[:end].encode()), min(match.start() for match in found)
            break
    byte = read(one, [data[at : at + 1] for at in range(len(data))])
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    cut = read(one, [data[a:b] for a, b in pairwise(places)])
    if wanted is None:
        assert byte is cut is None
        return
    assert byte is not None
    assert byte[0] == wanted[0]
    assert text[wanted[1] :].startswith(byte[1])
    assert cut is not None
    assert cut[1] == byte[1]
    assert places[cut[0] - 1] < wanted[0] <= places[cut[0]]


def test_strings_and_patterns_together() -> None:
    """What is complete first; at the same place the string."""
    one = rule(stop=("abc",), stop_regex=("b+", "c"))
    assert read(one, [b"xabc"]) == (1, "b")
    assert read(rule(stop=("ab",), stop_regex=("b+",)), [b"xabc"]) == (1, "ab")
    assert read(rule(stop=("ab",), stop_regex=("bc",)), [b"x", b"a", b"bc"]) == (3, "ab")
    assert read(rule(stop=("zz",), stop_regex=("bc",)), [b"x", b"a", b"bc"]) == (3, "bc")


def test_broken_bytes_are_one_strange_character_each() -> None:
    one = rule(stop_regex=("a.b",))
    assert read(one, [b"a\xff", b"b"]) == (2, "a\ufffdb")
    assert read(one, [b"a\xea\xb0", b"\x80b"]) == (2, "a가b")
    assert read(one, [b"a\xea\xb0", b"b"]) is None


def test_one_may_go_back() -> None:
    one = rule(stop_regex=("abba",), stop=("aaa",))
    _, seen = one.read(NOTHING_SEEN, b"ab")
    assert one.read(seen, b"xba")[0] is None
    assert one.read(seen, b"ba")[0] == "abba"
    assert isinstance(seen, Seen)


def test_patterns_that_cannot_be_kept_are_named() -> None:
    with pytest.raises(BadConstraint) as caught:
        search_of(("a", "(b", "c"))
    assert caught.value.where == "sampling_params.stop_regex[1]"
    with pytest.raises(UnsupportedConstraint, match="back reference"):
        search_of((r"(a)\1",))
    with pytest.raises(BadConstraint) as caught:
        search_of(("a{1000}", "b{1000}", "c{1000}"))
    assert caught.value.where == "sampling_params.stop_regex"
    assert search_of(("a", "b")) is search_of(("a", "b"))
