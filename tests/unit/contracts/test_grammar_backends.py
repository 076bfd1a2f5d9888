"""What every grammar backend keeps: fullmatch's language, rollback, copies, forced text, honest refusals."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import pytest

from runtime.grammar.base import GrammarBackend, Matcher
from runtime.grammar.byte_matcher import byte_matcher
from runtime.grammar.table import GRAMMAR_BACKENDS, make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from runtime.protocol.registry import UnknownName
from runtime.protocol.vocabulary import Vocabulary
from tests.unit.runtime.grammar import drawn

EOS = 256
VOCABULARY = Vocabulary(
    (
        *(bytes([value]) for value in range(256)),
        b"",
        b"ab",
        b"abc",
        b" the",
        "é".encode(),
        b'": "',
        b"\xf0\x9f",
        b"",
        b"20",
    ),
    frozenset({EOS, 263}),
    frozenset({EOS}),
)
CORPUS: dict[str, tuple[list[str], list[str]]] = {
    r"\d{4}-\d\d-\d\d": (["2026-11-21"], ["2026-1-21", "", "2026-11-210", "２026-11-2x"]),
    r"(Yes|No|Not sure)": (["Yes", "No", "Not sure"], ["yes", "Not", "Not sure ", "Yes\n"]),
    r'\{"name": "[^"\\]{1,8}", "ok": (true|false)\}': (
        ['{"name": "éa", "ok": true}'],
        ['{"name": "", "ok": true}', '{"name": "a"}'],
    ),
    r"(?i)straße [a-c]+": (["STRAßE abC", "ſTRAẞE a"], ["STRASSE a"]),
    r"[\w.]+@[\w.]+": (["user@example.com", "é@日"], ["@", "a@", "a b@c"]),
    r"^(a|b)*abb$": (["abb", "aababb"], ["ab", "abba", "abb\n"]),
    r".+?": (["x", "日本語"], ["", "a\nb"]),
    r"(?s:.)*": (["", "\n\n"], []),
    r"(a|)b?": (["", "a", "b", "ab"], ["ba"]),
}


@pytest.fixture(scope="module", params=[name for name in GRAMMAR_BACKENDS if name != "none"])
def backend(request: pytest.FixtureRequest) -> GrammarBackend:
    return make_backend(request.param, VOCABULARY)


def allowed(matcher: Matcher) -> list[int]:
    mask = matcher.mask()
    ids = np.flatnonzero(np.unpackbits(mask.bits.view(np.uint8), bitorder="little")).tolist()
    assert mask.allowed is None or mask.allowed.tolist() == ids
    return ids


@pytest.mark.parametrize("pattern", CORPUS)
def test_accepts_what_fullmatch_accepts(backend, pattern):
    good, bad = CORPUS[pattern]
    for text in [*good, *bad]:
        matcher = backend.compile(Constraint("regex", pattern))
        taken = matcher.advance_bytes(text.encode()) and matcher.may_stop()
        assert taken == (re.fullmatch(pattern, text) is not None) == (text in good)


@pytest.mark.parametrize("pattern", CORPUS)
def test_masks_say_what_advance_does(backend, pattern):
    matcher, pick = backend.compile(Constraint("regex", pattern)), random.Random(2)
    for _ in range(12):
        ids = allowed(matcher)
        for token in range(len(VOCABULARY)):
            assert matcher.copy().advance(token) == (token in ids)
        assert (EOS in ids) == matcher.may_stop()
        assert not set(ids) & (VOCABULARY.special - {EOS})
        text_ids = [token for token in ids if token != EOS]
        if not text_ids:
            assert matcher.is_terminated()
            break
        assert not matcher.is_terminated()
        assert matcher.advance(pick.choice(text_ids))


WORDY = {"type": "string", "maxLength": 500, "minLength": 1, "pattern": r"^(?:\S+\s+){0,49}\S+$"}
MEMBERS = {
    "name": {"type": "string", "maxLength": 9},
    "n": {"type": "integer"},
    "k": {"enum": ["é", "ab", 3]},
}
TAGS = [{"begin": "<a>", "schema": {"properties": MEMBERS}, "end": "</a>"}]
KINDS: dict[str, tuple[str, Any]] = {
    "regex": ("regex", r"(?:[a-zé]+[0-9]{1,3} ?)*"),
    "a long regex": ("regex", r"(?:\S+\s+){0,49}\S+"),
    "choices": ("choices", ["Paris", "Pavia", "", "東京", "a.b*", "Paris, France"]),
    "object": ("json_schema", {"type": "object", "properties": MEMBERS, "required": ["name"],
                               "additionalProperties": False}),
    "open object": ("json_schema", {"type": "object"}),
    "words": ("json_schema", {"type": "object", "properties": {"a": WORDY}, "required": ["a"],
                              "additionalProperties": False}),
    "lists": ("json_schema", {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}),
    "unique items": ("json_schema", {"type": "array", "uniqueItems": True, "items": {"type": "integer"}}),
    "not": ("json_schema", {"type": "array", "items": {"type": "string", "not": {"enum": ["ab"]}}}),
    "one of": ("json_schema", {"type": "array", "items": {"oneOf": [
        {"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 5}]}}),
    "tree": ("json_schema", {"$ref": "#/$defs/t", "$defs": {"t": {
        "type": "object", "properties": {"v": {"maxLength": 3}, "kids": {"items": {"$ref": "#/$defs/t"}}}}}}),
    "format": ("json_schema", {"type": "array", "items": {"type": "string", "format": "date"}}),
    "grammar": ("ebnf", 'root ::= item ("," item)*\nitem ::= [a-zé]+ | "(" root ")" | "20" [0-9]{2,6}'),
    "tags": ("structural_tag", {"structures": TAGS, "triggers": ["<"]}),
    "one tag": ("structural_tag", {"type": "structural_tag", "format": {
        "type": "tag", "begin": "<t>", "end": "</t>",
        "content": {"type": "json_schema", "json_schema": {"type": "object", "properties": MEMBERS}}}}),
}  # fmt: skip


def refused(matcher: Matcher, token: int) -> bool:
    return not matcher.copy().advance(token)


def walked(start: Matcher, pick: random.Random, vocabulary: Vocabulary, steps: int) -> int:
    """Follow an output that is drawn from the masks; at each place advance() says what the mask says."""
    matcher, taken = start.copy(), 0
    eos = set(vocabulary.eos)
    for step in range(steps):
        ids = allowed(matcher)
        inside = set(ids)
        some = ids if len(ids) < 40 or step % 20 == 0 else pick.sample(ids, 12)
        outside = [token for token in range(-1, len(vocabulary) + 1) if token not in inside]
        others = outside if len(outside) < 60 or step % 20 == 0 else pick.sample(outside, 12)
        assert not [token for token in some if refused(matcher, token)], (step, "in its mask, and refused")
        assert not [token for token in others if not refused(matcher, token)], (
            step,
            "taken, not in its mask",
        )
        assert bool(eos & inside) == matcher.may_stop()
        texts = [token for token in ids if token not in eos]
        if not texts:
            return taken
        turn = pick.random()
        if turn < 0.1:
            back = pick.randint(0, min(taken, 5))
            matcher.rollback(back)
            taken -= back
            continue
        if turn < 0.2:
            matcher = matcher.copy()
        long = [token for token in texts if len(vocabulary.tokens[token]) > 1]
        token = pick.choice(long if long and pick.random() < 0.6 else texts)
        if turn < 0.3:
            # Given text that was not sampled; a wider language may take it, too.
            assert matcher.advance_bytes(vocabulary.tokens[token])
        else:
            assert matcher.advance(token)
        taken += 1
    return taken


@pytest.mark.parametrize("kind", KINDS)
def test_masks_of_every_kind_say_what_advance_does(backend, kind):
    """Along outputs that are longer than what any limit between two masks allows for, on copies, after
    rollbacks and given text: what is refused once may never have been offered."""
    name, spec = KINDS[kind]
    constraint = Constraint(name, spec if isinstance(spec, str) else json.dumps(spec))
    try:
        start = backend.compile(constraint)
    except UnsupportedConstraint:
        assert backend.name != "auto"
        return
    vocabulary = backend.vocabulary
    for seed in range(3):
        walked(start, random.Random(f"{kind}{seed}"), vocabulary, 60)


@pytest.mark.parametrize("kind", ["words", "a long regex", "tree", "grammar", "tags"])
def test_they_do_so_over_long_outputs_of_a_real_vocabulary(kind):
    """With the checkpoint's own tokens, which spell many kinds of characters."""
    vocabulary = drawn.vocabulary("pocket")
    name, spec = KINDS[kind]
    constraint = Constraint(name, spec if isinstance(spec, str) else json.dumps(spec))
    start = make_backend("auto", vocabulary).compile(constraint)
    assert max(walked(start, random.Random(seed), vocabulary, 150) for seed in range(2)) > 20


@pytest.mark.parametrize("pattern", CORPUS)
def test_rollback_and_copies_are_exact(backend, pattern):
    matcher, pick = backend.compile(Constraint("regex", pattern)), random.Random(4)
    trail = [allowed(matcher)]
    for _ in range(10):
        ids = allowed(matcher)
        if matcher.is_terminated():
            break
        token = pick.choice(ids)
        if token != EOS and pick.random() < 0.3:
            assert matcher.advance_bytes(VOCABULARY.tokens[token])
        else:
            assert matcher.advance(token)
        trail.append(allowed(matcher))
    steps = len(trail) - 1
    for _ in range(10):
        back = pick.randint(0, steps)
        twin = matcher.copy()
        twin.rollback(back)
        assert allowed(twin) == trail[steps - back]
        assert allowed(matcher) == trail[-1], "a copy must not move its original"
    with pytest.raises(ValueError, match="undo"):
        matcher.copy().rollback(steps + 1)
    matcher.rollback(steps)
    assert allowed(matcher) == trail[0]


def test_refused_steps_change_nothing(backend):
    matcher = backend.compile(Constraint("regex", "abc?d"))
    before = allowed(matcher)
    assert not matcher.advance(ord("x"))
    assert not matcher.advance_bytes(b"abx")
    for token in (EOS, 263, -1, len(VOCABULARY)):
        assert not matcher.advance(token)
    assert allowed(matcher) == before
    assert matcher.advance_bytes(b"")
    matcher.rollback(1)
    assert allowed(matcher) == before


def test_the_end(backend):
    matcher = backend.compile(Constraint("regex", "ab?"))
    assert not matcher.may_stop()
    assert matcher.advance(ord("a"))
    assert matcher.may_stop()
    assert not matcher.is_terminated()
    stopped = matcher.copy()
    assert stopped.advance(EOS)
    assert stopped.is_terminated()
    assert stopped.may_stop()
    assert not stopped.advance(ord("b"))
    assert not stopped.advance_bytes(b"b")
    assert stopped.forced_bytes() == b""
    assert allowed(stopped) == [EOS]
    stopped.rollback(1)
    assert stopped.advance(ord("b"))
    assert stopped.is_terminated()
    assert allowed(stopped) == [EOS]


@pytest.mark.parametrize(
    ("pattern", "forced"),
    [
        (r'\{"name": "[a-z]+"\}', b'{"name": "'),
        ("(Paris|Pavia)", b"Pa"),
        ("ab*c", b"a"),
        ("ab?", b"a"),
        ("hello world", b"hello world"),
        ("[가-각]", b"\xea\xb0"),
        ("(😊|😋)x", b"\xf0\x9f\x98"),
        ("a?b", b""),
        (".", b""),
    ],
)
def test_forced_bytes(backend, pattern, forced):
    matcher = backend.compile(Constraint("regex", pattern))
    assert matcher.forced_bytes() == forced
    assert matcher.advance_bytes(forced)
    assert matcher.forced_bytes() == b""


def test_choices(backend):
    options = ["Paris", "Pavia", "", "東京", "a.b*", "Paris, France"]
    constraint = Constraint("choices", json.dumps(options))
    for text in [*options, "P", "Pari", "aXb", "東", " Paris"]:
        matcher = backend.compile(constraint)
        assert (matcher.advance_bytes(text.encode()) and matcher.may_stop()) == (text in options)
    assert backend.compile(Constraint("choices", '["Paris", "Pavia"]')).forced_bytes() == b"Pa"


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("regex", "(a"),
        ("regex", "[z-a]"),
        ("regex", "a^b"),
        ("choices", "[]"),
        ("choices", "{"),
        ("choices", "[1]"),
        ("choices", '"x"'),
    ],
)
def test_mistakes_say_where(backend, kind, spec):
    with pytest.raises(BadConstraint) as caught:
        backend.compile(Constraint(kind, spec))
    assert kind in str(caught.value)


@pytest.mark.parametrize("kind", ["json_schema", "ebnf", "structural_tag"])
def test_other_kinds_are_kept_or_refused_by_name(backend, kind):
    specs = {
        "json_schema": '{"type": "object", "minProperties": 3, "uniqueItems": true}',
        "ebnf": 'root ::= "a"',
        "structural_tag": '{"structures": [{"begin": "<a>", "schema": true, "end": "</a>"}], "triggers": ["<"]}',  # noqa: E501
    }
    try:
        backend.compile(Constraint(kind, specs[kind]))
    except UnsupportedConstraint as error:
        refusal = str(error)
    else:
        return
    assert kind in refusal


NAMED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS: list[tuple[dict[str, object], list[str], list[str]]] = [
    (NAMED, ['{"a": 1}'], ['{"a": "1"}', "{}", '{"a": 1, "b": 2}', "[]", '{"a": 1']),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, ["[1, 2]"], ["[1, 1]", '["1"]']),
    ({"type": "integer", "minimum": 3, "multipleOf": 2}, ["4"], ["2", "5", "4.5", '"4"']),
    ({"type": "string", "minLength": 2, "pattern": "^a"}, ['"ab"'], ['"a"', '"ba"', "ab"]),
    ({"oneOf": [{"minimum": 3, "type": "integer"}, {"maximum": 5, "type": "integer"}]}, ["2", "6"], ["4"]),
    ({"type": "object", "minProperties": 2}, ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a": 1, "a": 2}']),
    ({"type": "string", "not": {"enum": ["ab"]}}, ['"a"', '"abc"'], ['"ab"']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"x"']),
    ({"if": {"type": "integer"}, "then": {"minimum": 0}}, ["1", '"x"'], ["-1"]),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ['{"a": 1, "b": 2}', "{}"], ['{"a": 1}']),
    ({"type": "array", "contains": {"type": "null"}}, ["[1, null]"], ["[]", "[1]"]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), SCHEMAS, ids=lambda value: None)
def test_schemas_are_kept_whole_or_refused(backend, schema, good, bad):
    try:
        start = backend.compile(Constraint("json_schema", json.dumps(schema)))
    except UnsupportedConstraint:
        return
    assert start.origin.backend in GRAMMAR_BACKENDS
    for text in [*good, *bad]:
        matcher = start.copy()
        taken = matcher.advance_bytes(text.encode()) and matcher.may_stop()
        assert taken == (text in good), text


def test_auto_keeps_every_schema():
    for schema, good, bad in SCHEMAS:
        face = byte_matcher("json_schema", json.dumps(schema))
        for text in [*good, *bad]:
            twin = face.copy()
            assert (all(map(twin.advance, text.encode())) and twin.may_stop()) == (text in good)


@pytest.mark.parametrize("pattern", CORPUS)
def test_byte_face(pattern):
    good, _ = CORPUS[pattern]
    for text in good:
        face = byte_matcher("regex", pattern)
        for byte in text.encode():
            assert byte in face.next_bytes()
            assert face.advance(byte)
        assert face.may_stop()
        refused = set(range(256)) - face.next_bytes()
        assert not any(face.copy().advance(byte) for byte in refused)


def test_none_refuses_everything():
    with pytest.raises(UnsupportedConstraint, match=r"not supported with grammar-backend none"):
        make_backend("none", VOCABULARY).compile(Constraint("regex", "a"))


def test_unknown_backends_list_the_known():
    with pytest.raises(UnknownName, match="outlines"):
        make_backend("nothing", VOCABULARY)
