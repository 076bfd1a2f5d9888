"""Completions: ids that are allowed one by one and end where the constraint may stop, for every backend."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.grammar.base import Matcher, first_completion
from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.completion import at_once, follows, rest_of, search
from runtime.grammar.manager import GrammarManager
from runtime.grammar.reasoner import Reasoning, ReasoningEnd
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint, ConstraintKind
from runtime.protocol.errors import BadConstraint
from runtime.protocol.vocabulary import Vocabulary
from tests.exploring import tries

PIECES = [
    b'"}',
    b'":',
    b", ",
    b"[]",
    b"{}",
    b'""',
    b"true",
    b"null",
    b"ab",
    b"description",
    b"10",
    b"</think>",
]
TOKENS = (*(bytes([value]) for value in range(256)), *PIECES, b"", b"")
EOS, MARK = len(TOKENS) - 1, len(TOKENS) - 2
VOCABULARY = Vocabulary(TOKENS, frozenset({EOS, MARK}), frozenset({EOS}))

CASES: list[tuple[ConstraintKind, str]] = [
    ("regex", r"[a-z0-9]+@[a-z]+\.(com|org)"),
    ("regex", r"(\d{1,3}\.){3}\d{1,3}"),
    ("regex", r"x{40}"),
    ("regex", r"(ab|ac|ad)*zz"),
    ("regex", r"[가-힣]{2}"),
    ("choices", json.dumps(["yes", "no", "perhaps"])),
    ("ebnf", 'root ::= "(" root ")" | [0-9]+ "!"'),
    ("json_schema", json.dumps({"type": "object", "properties": {"a": {"type": "string", "minLength": 9},
     "b": {"type": "array", "items": {"type": "integer"}, "minItems": 2}}, "required": ["a", "b"]})),
    ("structural_tag", json.dumps({"type": "structural_tag", "structures": [
     {"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f>"]})),
]  # fmt: skip
CHECKED: list[Any] = [
    {"type": "array", "items": {"enum": [1, 2, 3]}, "uniqueItems": True, "minItems": 3},
    {"type": "array", "items": {"type": "integer"}, "contains": {"const": 5}},
    {"type": "string", "not": {"enum": ["", "a"]}},
    {"if": {"type": "integer"}, "then": {"multipleOf": 7, "minimum": 100}, "else": {"type": "null"}},
    {"type": "object", "properties": {"a": True, "b": {"type": "null"}}, "dependentRequired": {"a": ["b"]},
     "required": ["a"], "additionalProperties": False},
]  # fmt: skip


@lru_cache(maxsize=64)
def compiled(backend: str, kind: ConstraintKind, spec: str) -> Matcher:
    return make_backend(backend, VOCABULARY).compile(Constraint(kind, spec))


def supported() -> list[tuple[str, ConstraintKind, str]]:
    both = ("llguidance", "xgrammar")
    regular = ("outlines", *both)
    return [
        (name, kind, spec)
        for kind, spec in CASES
        for name in (regular if kind in ("regex", "choices") else both)
    ]


def walked(matcher: Matcher, steps: int, pick: random.Random) -> Matcher:
    """Some random steps on, as far as something may follow."""
    for _ in range(steps):
        bits = np.unpackbits(matcher.mask().bits.view(np.uint8), bitorder="little")
        ids = [token for token in np.flatnonzero(bits).tolist() if token != EOS]
        if not ids or not matcher.advance(pick.choice(ids)):
            break
    return matcher


def is_completion(matcher: Matcher, ids: tuple[int, ...]) -> bool:
    twin = matcher.copy()
    for token in ids:
        bits = twin.mask().bits
        if not int(bits[token >> 5]) >> (token & 31) & 1 or not twin.advance(token):
            return False
    return twin.may_stop()


@pytest.mark.parametrize(("backend", "kind", "spec"), supported())
def test_a_completion_leads_from_everywhere_to_an_end(backend: str, kind: ConstraintKind, spec: str) -> None:
    pick = random.Random(1)
    start = compiled(backend, kind, spec).copy()
    first = first_completion(start)
    assert first.ids is not None
    assert is_completion(start, first.ids)
    found = 0
    for steps in range(0, 12, 2):
        matcher = walked(start.copy(), steps, pick)
        before = matcher.mask().bits.tobytes()
        ids = matcher.closing(200)
        assert matcher.mask().bits.tobytes() == before
        found += ids is not None
        if ids is not None:
            assert is_completion(matcher, ids)
            assert EOS not in ids
            assert follows(matcher, ids)
            if ids:
                assert len(matcher.closing(len(ids) - 1) or ()) < len(ids)
    assert found >= 4


@pytest.mark.parametrize("schema", CHECKED)
def test_completions_satisfy_what_is_only_checked(schema: Any) -> None:
    matcher = compiled("llguidance", "json_schema", json.dumps(schema)).copy()
    ids = first_completion(matcher).ids
    assert ids is not None
    assert is_completion(matcher, ids)
    jsonschema.validate(json.loads(b"".join(TOKENS[token] for token in ids)), schema)


@settings(deadline=None, max_examples=tries(40), suppress_health_check=list(HealthCheck))
@given(
    st.recursive(
        st.sampled_from(["a", "b", "[a-c]", "\\d", "x{3}", "[^q]{2,5}"]),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map("".join),
            st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
            inner.map(lambda one: f"({one})+"),
            inner.map(lambda one: f"({one})*!"),
        ),
        max_leaves=6,
    ),
    st.integers(0, 6),
    st.randoms(use_true_random=False),
)
def test_completions_of_random_expressions(pattern: str, steps: int, pick: random.Random) -> None:
    matcher = walked(make_backend("outlines", VOCABULARY).compile(Constraint("regex", pattern)), steps, pick)
    ids = matcher.closing(64)
    assert ids is not None, pattern
    assert is_completion(matcher, ids)
    generic = search(matcher, VOCABULARY, 64, seconds=5)
    assert not generic.empty  # bounded, it may miss one
    assert generic.ids is None or is_completion(matcher, generic.ids)


def test_the_end_of_a_completion_is_good_further_on() -> None:
    matcher = compiled("llguidance", *CASES[7]).copy()
    ids = first_completion(matcher).ids
    assert ids is not None
    assert matcher.advance_bytes(b'{"a":"something else')
    rest = at_once(rest_of(matcher, ids))
    assert rest is not None
    assert is_completion(matcher, rest)
    assert len(rest) < len(ids)


def test_reasoning_is_ended_first() -> None:
    inner = compiled("llguidance", *CASES[7]).copy()
    matcher = Reasoning(VOCABULARY, ReasoningEnd(ids=((MARK,),))).wrap(inner, thinking=True)
    assert matcher.advance(ord("h"))
    ids = matcher.closing(100)
    assert ids is not None
    assert ids[0] == MARK
    assert is_completion(matcher, ids)


def test_what_nothing_can_match_is_refused_when_it_is_compiled() -> None:
    manager = GrammarManager(VOCABULARY, "llguidance", options={"whitespace": "compact"})
    schema = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "contains": {"const": 3}}
    spec = json.dumps(schema)
    try:
        with pytest.raises(BadConstraint, match="nothing can match"):
            manager.submit(Constraint("json_schema", spec)).result(300)
        origin = manager.submit(Constraint(*CASES[7])).result(300).origin
        # A short whole output is found at a glance; a longer one is looked for when somebody needs it.
        ids = origin.shortest if origin.searched else origin.completion and origin.completion.get()
        assert ids
        brief = manager.submit(Constraint("json_schema", '{"enum": [1, 2]}')).result(300).origin
        assert brief.searched
        assert brief.shortest is not None
    finally:
        manager.close()


def test_work_is_bounded() -> None:
    """A language whose words are all long: nothing is found in a few places, and nothing is said of it."""
    found = search(compiled("llguidance", "regex", r"(a|b){900}").copy(), VOCABULARY, 2000, work=20)
    assert found == (None, False)


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second for every look at the clock: four places, the longest of which does not count."""
    ticks, start = itertools.count(), compiled("llguidance", *CASES[7]).copy()
    monkeypatch.setattr("runtime.grammar.completion.time", SimpleNamespace(thread_time=lambda: next(ticks)))
    assert search(start, VOCABULARY, 200, seconds=2.5) == (None, False)
    assert next(ticks) == 8
    assert search(start, VOCABULARY, 200, seconds=1000).ids is not None


def test_one_long_pause_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection of a large process, say."""
    start = compiled("llguidance", *CASES[7]).copy()
    for at in range(12):
        ticks = itertools.chain(range(at), itertools.repeat(100))
        told = lambda ticks=ticks: 1e-6 * next(ticks)  # noqa: E731
        monkeypatch.setattr("runtime.grammar.completion.time", SimpleNamespace(thread_time=told))
        assert search(start, VOCABULARY, 200, seconds=2e-5).ids is not None


@pytest.mark.parametrize("rare", [" ", "\\t", "\n", "\\\\", "\u00e9"])
@pytest.mark.parametrize("before", [b"", b"ab", b"\xe2", b"a\xf0\x9f"])
def test_what_alone_ends_a_pattern_is_tried(rare: str, before: bytes) -> None:
    """Behind `any text`, one character of many; the library's automaton tells no way to it."""
    backend = make_backend("llguidance", BYTES)
    matcher = backend.compile(Constraint("regex", f"(?s:.)*{rare}"))
    assert matcher.advance_bytes(before)
    ending = matcher.closing(64)
    assert ending is not None
    assert re.fullmatch(f"(?s:.)*{rare}", (before + bytes(ending)).decode())
