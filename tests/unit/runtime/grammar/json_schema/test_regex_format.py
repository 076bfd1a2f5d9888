"""The format `regex`: what ECMA-262 takes for a regular expression, told at a cost that does not grow."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime.grammar.json_schema.texts import regex_format
from runtime.grammar.json_schema.texts.ecma import spell
from runtime.grammar.json_schema.texts.regex_format import is_regex
from runtime.protocol.errors import BadConstraint
from tests.exploring import tries

GOOD = [
    "", "a", "^a$", "(a|b)*c+?", "a{2}{", "a{2,}?", "{", "a{,3}", "]", "}", "[]", "[^]", "[]a]", "(?:a)",
    "(?=a)b",
    "(?<=a)b",
    "(?<n>a)\\k<n>", "\\1(a)", "(a)\\1", "\\d\\u0041\\u{1F600}\\x41\\cA\\.\\-\\é", "[\\b\\]a-z\\d-]",
    "\\p{L}\\P{Script=Greek}", "a" * 900, "(" * 200 + ")" * 200, "a{999999999}",
]  # fmt: skip
BAD = [
    "(", ")", "a)", "(a", "[", "[a", "a**", "*", "|+", "^*", "\\b+", "a{2}{3}", "a{3,2}", "\\", "\\q", "\\x4",
    "\\u00", "\\u{", "\\c1", "\\k<n>", "\\1", "(?<n>a)(?<n>b)", "(?<1>a)", "(?i)a", "(?#a)", "(?", "[z-a]",
    "[\\B]",
    "\\p{Nobody}", "\\p", "a++", "(?<=a)*", "\\Z", "\\A", "[\\q]",
]  # fmt: skip


@pytest.mark.parametrize("text", GOOD)
def test_what_is_one(text: str) -> None:
    assert is_regex(text)


@pytest.mark.parametrize("text", BAD)
def test_what_is_none(text: str) -> None:
    assert not is_regex(text)
    assert not is_regex("ab" * 60 + "|" + text)


PIECES = [
    "a", "b1", "-", "é", " ", "\\d", "\\", "[", "]", "[^", "(", "(?:", "(?=", "(?<n>", "(?<=", ")", ")",
    "*", "+",
    "?", "{", "}", "{2}", "{2,}", "{1,3}", ",", "|", "^", "$", ".", "\\k<n>", "\\u0041", "\\x41", "\\p{L}",
    "\\p{Foo}", "[a-z]", "[z-a]", "\\cA", "\\-", "\\q", "{3,1}", "x" * 30,
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


@settings(deadline=None, max_examples=tries(400))
@example("(?<=)*")
@example("((?<!a)b)+(?<=c){2}")
@given(texts)
def test_patterns_and_the_format_agree(text: str) -> None:
    """But for repeats that take all they can, which ECMA has not, and for forward references."""
    try:
        spell(text)
    except BadConstraint:
        taken = False
    else:
        taken = True
    if re.search(r"[*+?}]\+", text):
        return  # it depends on what stands before: `a*+` takes all it can, `}+` and `\\*+` repeat a character
    assert is_regex(text) in (taken, taken or "\\k<n>" in text)


@settings(deadline=None, max_examples=tries(200))
@given(texts, texts, st.lists(texts, min_size=1, max_size=4))
def test_what_is_kept_of_a_beginning_changes_nothing(before: str, begun: str, ends: list[str]) -> None:
    begun = before * 4 + begun
    kept = [is_regex(begun + end) for end in ends]
    found = []
    for end in ends:
        whole = regex_format._walk(begun + end, regex_format._Position(), len(begun + end))
        found.append(whole is not None and whole.at == len(begun + end) and not whole.open
                     and whole.number <= whole.groups and whole.named <= whole.names)  # fmt: skip
    assert kept == found


def test_a_beginning_is_read_once_for_all_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask asks of each token that may close a string what the text would be then."""
    steps = 0
    past = regex_format._past

    def counted(*given: Any) -> Any:
        nonlocal steps
        steps += 1
        return past(*given)

    monkeypatch.setattr(regex_format, "_past", counted)
    begun = "ab(c)d+" * 500
    assert all(is_regex(begun + end) for end in ["", *(f"{number}x?" for number in range(300))])
    assert steps < 3_000 + 300 * 60
