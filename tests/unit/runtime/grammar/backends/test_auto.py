"""The choice among backends: the first that keeps a constraint, and what is told about it."""

from __future__ import annotations

import pytest

from runtime.grammar.byte_matcher import BYTES, byte_matcher
from runtime.grammar.manager import GrammarManager
from runtime.grammar.table import GRAMMAR_BACKENDS, ORDER, make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest, UnsupportedConstraint


@pytest.mark.parametrize(
    ("kind", "spec", "backend"),
    [("regex", "a+", "outlines"), ("choices", '["a"]', "outlines"), ("json_schema", "{}", "llguidance")],
)
def test_the_best_backend_is_chosen_and_told(kind, spec, backend):
    matcher = make_backend("auto", BYTES).compile(Constraint(kind, spec))
    assert (matcher.origin.backend, matcher.origin.exact) == (backend, True)
    assert matcher.origin.why
    assert matcher.copy().origin == matcher.origin


def test_every_name_in_the_order_is_in_the_table():
    assert {name for names in ORDER.values() for name in names} <= set(GRAMMAR_BACKENDS)


def test_a_mistake_is_not_asked_of_another_backend():
    with pytest.raises(BadConstraint, match="position"):
        byte_matcher("regex", "(a")


def test_a_refusal_names_what_is_refused():
    with pytest.raises(UnsupportedConstraint, match="elsewhere"):
        byte_matcher("json_schema", '{"$ref": "http://elsewhere.invalid/schema"}')


def test_unknown_kinds_and_options_are_refused():
    with pytest.raises(BadConstraint, match="unknown kind 'poem'"):
        byte_matcher("poem", "x")
    with pytest.raises(BadRequest, match="rhyme"):
        byte_matcher("regex", "x", rhyme=True)


def test_lark_and_gbnf():
    for spec in ('start: "a" /[0-9]+/', 'root ::= "a" [0-9]+'):
        face = byte_matcher("ebnf", spec, backend="llguidance")
        assert all(map(face.advance, b"a12"))
        assert face.may_stop()
        assert face.next_bytes() == set(b"0123456789")
    with pytest.raises(BadConstraint, match="ebnf"):
        byte_matcher("ebnf", 'start: "a', backend="llguidance")


def test_the_manager_passes_options_on():
    manager = GrammarManager(BYTES, options={"whitespace": "compact"})
    try:
        matcher = manager.submit(Constraint("json_schema", '{"type": "array"}')).result(timeout=300)
    finally:
        manager.close()
    assert matcher.advance_bytes(b"[1")
    assert not matcher.copy().advance_bytes(b", 2")
    assert matcher.advance_bytes(b",2]")
    assert matcher.is_terminated()
