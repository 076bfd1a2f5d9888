"""Search finds what re.search over the growing text finds first, however the text is cut."""

from __future__ import annotations

import re
import threading
import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.grammar.search import MAX_STATES, Match, Search
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from tests.exploring import tries

ATOMS = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", "é", "🦊", r"\n", "(?i:b)"])
CONDITIONS = st.sampled_from([r"\b", r"\B", "^", "$", "(?m:^)", "(?m:$)", r"\A", r"\Z"])


def combined(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map(lambda two: f"(?:{two[0]}|{two[1]})"),
        st.tuples(parts, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "*?"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    )


PATTERNS = st.recursive(ATOMS, combined, max_leaves=6)
WITH_CONDITIONS = st.recursive(st.one_of(ATOMS, CONDITIONS), combined, max_leaves=6)
TEXT = st.text("abAB1é🦊\n \ufffd", max_size=12)


def first(patterns: list[str], text: str) -> tuple[int, int] | None:
    """(characters read until re.search finds something, where the leftmost match begins)."""
    for end in range(len(text) + 1):
        starts = [found.start() for one in patterns if (found := re.search(one, text[:end]))]
        if starts:
            return end, min(starts)
    return None


def read(search: Search, text: str, cuts: list[int]) -> tuple[int, int, str] | None:
    """(characters read at most, where the match begins, its text) when the text comes in pieces."""
    place = search.begin
    for begin, end in pairwise([0, *cuts, len(text)]):
        place, found = search.feed(place, text[begin:end])
        if found is not None:
            return end, end - found.start, found.text
    return None


@settings(max_examples=tries(400), deadline=None)
@given(st.lists(PATTERNS, min_size=1, max_size=3), TEXT, st.lists(st.integers(0, 12), max_size=4))
@example(["a{2}b|ab"], "aaab", [])
@example(["(a+)+b"], "aaaaaaaaab", [])
@example(["a*b"], "1aab", [2])
@example(["(a|1)?b"], "11b", [])
def test_finds_what_re_finds(patterns: list[str], text: str, places: list[int]) -> None:
    same(patterns, text, places)


@settings(max_examples=tries(400), deadline=None)
@given(st.lists(WITH_CONDITIONS, min_size=1, max_size=2), TEXT, st.lists(st.integers(0, 12), max_size=4))
@example([r"\bab\b"], "bab ab a", [])
@example([r"ab\B"], "ab aba", [])
@example([r"\ba*b"], "1aab aab", [6])
@example(["(?m)^a$"], "ba\nb\na\nb", [])
def test_conditions_on_neighbours(patterns: list[str], text: str, places: list[int]) -> None:
    same(patterns, text, places)


def same(patterns: list[str], text: str, places: list[int]) -> None:
    if any(re.search(pattern, "") for pattern in patterns):
        with pytest.raises(BadConstraint, match="empty"):
            Search(patterns)
        return
    search = Search(patterns)
    cuts = sorted(min(place, len(text)) for place in places)
    wanted, got = first(patterns, text), read(search, text, cuts)
    assert (got is None) == (wanted is None)
    if wanted is not None and got is not None:
        assert wanted[0] <= got[0]
        assert wanted[0] > max([0, *(cut for cut in cuts if cut < got[0])])
        assert got[1] == wanted[1]
        assert text[got[1] : wanted[0]].startswith(got[2])
        assert wanted[0] - got[1] - len(got[2]) in (0, 1)


@settings(max_examples=tries(200), deadline=None)
@given(st.lists(PATTERNS, min_size=1, max_size=2), TEXT)
def test_what_a_match_may_take_is_held(patterns: list[str], text: str) -> None:
    if any(re.search(pattern, "") for pattern in patterns):
        return
    search = Search(patterns)
    place, shown = search.begin, 0
    for at, char in enumerate(text):
        place, found = search.feed(place, char)
        if found is not None:
            assert at + 1 - found.start >= shown, "text that was let go is part of the match"
            return
        shown = at + 1 - place.held


def test_little_is_held_where_nothing_is_under_way() -> None:
    search = Search([r"\d{4}-\d{2}", "STOP"])
    place = search.begin
    held = []
    for char in "in 2024 it was STO 5":
        place, found = search.feed(place, char)
        assert found is None
        held.append(place.held)
    assert held == [0, 0, 0, 1, 2, 3, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 0, 1]
    _, found = search.feed(place, "000-12!")
    assert found == Match("5000-12", 8, 1)


@pytest.mark.parametrize(
    ("pattern", "kind", "word"),
    [
        ("a(?=b)", UnsupportedConstraint, "look-ahead"),
        (r"(a)\1", UnsupportedConstraint, "back reference"),
        ("(a", BadConstraint, "position 0"),
        ("a*", BadConstraint, "empty"),
        ("a{9999}", BadConstraint, "9999"),
        ("(" * 3000 + "a" + ")" * 3000, BadConstraint, "nested"),
    ],
)
def test_refused(pattern: str, kind: type[Exception], word: str) -> None:
    with pytest.raises(kind, match=word):
        Search([pattern])


@pytest.mark.parametrize(
    "patterns",
    [
        ["(a+)+$x"],
        ["(a|a)*z"],
        ["(x+x+)+y"],
        ["a.{100}c"],
        ["<.{1,200}>"],
        [f"[ab]{{{n}}}c" for n in range(40, 72)],
    ],
)
def test_no_pattern_is_slow(patterns: list[str]) -> None:
    """`re` takes for ever over some of these, and a whole automaton of others has 2**100 states."""
    search = Search(patterns)
    place, begin = search.begin, time.thread_time()
    for count in range(1000):
        place, found = search.feed(place, "aaba<xx"[count % 7] * 4)
        assert found is None
    assert time.thread_time() - begin < 20


def test_states_are_forgotten_and_places_stay_good() -> None:
    search = Search(["a[ab]{13}c"])
    place = search.begin
    text = "".join("ab"[(n * n + n // 7) % 2] for n in range(3 * MAX_STATES))
    for at in range(0, len(text), 50):
        place, found = search.feed(place, text[at : at + 50])
        assert found is None
    _, found = search.feed(place, "a" + "b" * 13 + "c")
    assert found is not None
    assert found.text == "a" + "b" * 13 + "c"


def test_threads_share_a_search() -> None:
    search = Search(["x[ab]{9}y"])
    wrong: list[str] = []

    def one(seed: int) -> None:
        place = search.begin
        for at in range(2000):
            place, found = search.feed(place, "xab"[(at * at + seed) % 3])
            if found is not None:
                wrong.append(found.text)
        _, found = search.feed(place, "xababababay")
        if found is None or not re.fullmatch("x[ab]{9}y", found.text):
            wrong.append(str(found))

    threads = [threading.Thread(target=one, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
