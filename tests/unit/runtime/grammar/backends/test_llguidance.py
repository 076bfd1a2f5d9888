"""A grammar that the llguidance library follows is followed on, whatever others did with it."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import pytest

from runtime.api import Engine
from runtime.grammar.backends.llguidance_backend import LLGuidanceBackend, LLGuidanceLimits
from runtime.grammar.backends.llguidance_parser import Parser, _Start
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, InternalFault
from runtime.protocol.io_struct import GenerateReqInput
from tests.unit.runtime.grammar import drawn

WORDS = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "maxLength": 500, "minLength": 1, "pattern": r"^(?:\S+\s+){0,49}\S+$"}
    },
    "required": ["a"],
    "additionalProperties": False,
}


def json_schema(schema: Any) -> Constraint:
    return Constraint("json_schema", json.dumps(schema))


def walk(start: Any, dice: random.Random, steps: int) -> int:
    """Follow tokens of its masks; how many there were."""
    matcher, eos = start.copy(), drawn.vocabulary("pocket").eos
    for step in range(steps):
        ways = [token for token in drawn.allowed(matcher) if token not in eos]
        if not ways:
            return step
        token = dice.choice(ways)
        assert matcher.advance(token), (step, drawn.vocabulary("pocket").tokens[token])
    return steps


def test_tokens_of_masks_are_taken_however_long_the_output():
    """Between two masks the lexer may only do so much; here each word may be one of very many states."""
    start = LLGuidanceBackend(drawn.vocabulary("pocket")).compile(json_schema(WORDS))
    assert max(walk_all(start, 6, 200)) > 100


def walk_all(start: Any, walks: int, steps: int) -> list[int]:
    return [walk(start, random.Random(number), steps) for number in range(walks)]


def test_a_constraint_answers_request_after_request():
    """Through the engine: an output drawn at a high temperature comes to each of them, and matches."""
    with Engine("pocket", max_total_tokens=4096) as engine:
        for seed in range(4):
            params = {
                "json_schema": json.dumps(WORDS),
                "temperature": 2.0,
                "seed": seed,
                "max_new_tokens": 120,
            }
            answer = engine.generate(GenerateReqInput(text="Once", sampling_params=params))
            closed = answer.meta["grammar"]["closed_by_budget"]
            assert answer.meta["finish_reason"]["type"] == ("length" if closed else "stop")
            assert jsonschema.Draft202012Validator(WORDS).is_valid(json.loads(answer.text))


TEXT = " ".join(f"wé{number}日" for number in range(48)).encode()
SMALL = LLGuidanceLimits(step_fuel=3_000)


@pytest.mark.parametrize("size", [1, 3, len(TEXT)])
def test_long_given_text_is_followed_without_masks(size):
    """Its work is that of many masks; none is asked for."""
    backend = LLGuidanceBackend(drawn.vocabulary("pocket"), parser_limits=SMALL)
    start = backend.compile(Constraint("regex", r"(?:\S+\s+){0,49}\S+"))
    matcher, wanted = start.copy(), start.copy()
    parts = [TEXT[place : place + size] for place in range(0, len(TEXT), size)]
    assert all(map(matcher.advance_bytes, parts))
    for byte in TEXT:
        wanted.mask()
        assert wanted.advance_bytes(bytes([byte]))
    assert drawn.allowed(matcher) == drawn.allowed(wanted)
    assert not matcher.copy().advance_bytes(b" a b c d")
    assert drawn.allowed(matcher) == drawn.allowed(wanted)
    matcher.rollback(1)
    assert matcher.advance_bytes(parts[-1])
    assert drawn.allowed(matcher) == drawn.allowed(wanted)


def test_a_lexer_full_of_states_is_made_anew():
    """Its states are kept for all who come; no constraint may come to an end by having been used much."""
    backend = LLGuidanceBackend(drawn.vocabulary("pocket"), parser_limits=LLGuidanceLimits(states=3_000))
    start = backend.compile(json_schema(WORDS))
    assert max(walk_all(start, 12, 60)) > 30


def test_what_is_too_complex_ends_nobody_else():
    """A text that cannot be followed within the limits fails whoever wrote it, and no other."""
    limits = LLGuidanceLimits(step_fuel=1_000)
    backend = LLGuidanceBackend(drawn.vocabulary("pocket"), parser_limits=limits)
    start = backend.compile(Constraint("regex", r"x+y|[^x](?:\S+\s+){0,49}\S+"))
    beside = start.copy()
    assert beside.advance_bytes(b"xx")
    with pytest.raises(BadConstraint, match="too complex"):
        walk_all(start, 20, 60)
    assert start.copy().advance_bytes(b"xxy")
    assert beside.advance_bytes(b"x")
    assert ord("y") in {drawn.vocabulary("pocket").tokens[token][0] for token in drawn.allowed(beside)}
    assert beside.advance_bytes(b"y")
    assert beside.may_stop()


class PanicException(BaseException):
    """What a panic of a library in Rust looks like from Python."""


class Panicking:
    def __getattr__(self, name):
        def call(*given):
            raise PanicException("index out of bounds")

        return call


@pytest.mark.parametrize(
    ("name", "given"),
    [("try_consume_tokens", ([1],)), ("compute_mask", (0, 0)),
     ("rollback", (1,)), ("compute_ff_bytes", ()), ("is_accepting", ()), ("is_stopped", ()), ("copy", ())],
)  # fmt: skip
def test_a_panic_is_a_fault_of_one_constraint(name, given):
    with pytest.raises(InternalFault, match="index out of bounds"):
        getattr(Parser(_Start(Panicking), Panicking(), 0, [1], "json_schema"), name)(*given)
