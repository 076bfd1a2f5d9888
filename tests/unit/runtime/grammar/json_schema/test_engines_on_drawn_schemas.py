"""All engines on drawn schemas: none takes an invalid document, none refuses a schema that has valid ones but
by name; a valid document that an engine does not take is explained here by what its language leaves out."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime.grammar.base import Matcher
from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint
from tests.exploring import tries
from tests.unit.runtime.grammar.json_schema.spelled import takes_value

NARROW = {
    "outlines": "what a regular expression keeps; values of any kind to a bounded depth",
    "xgrammar": "integers without fraction or exponent, and no escapes in strings of bounded length",
}
"""Engines whose language is narrower than the schema, and in what. The others take every valid document."""
LOOPS = int(os.environ.get("PROPERTY_LOOPS", "1"))
MADE = {name: make_backend(name, BYTES) for name in ("outlines", "xgrammar", "auto")}


def spelled(value: Any) -> list[str]:
    return [
        json.dumps(value, ensure_ascii=False),
        json.dumps(value, ensure_ascii=False, separators=(",", ":")),
        json.dumps(value, indent=1),
    ]


def listed(schema: Any) -> list[Any]:
    """What it lists as values, at any depth: the likeliest ones to be told apart wrongly."""
    if isinstance(schema, list):
        return [value for inner in schema for value in listed(inner)]
    if not isinstance(schema, dict):
        return []
    found = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    return found + [value for inner in schema.values() for value in listed(inner)]


@pytest.mark.parametrize("engine", MADE)
@settings(deadline=None, max_examples=tries(15 * LOOPS), suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_drawn_schemas(small, engine, data):
    schema = data.draw(small.schemas)
    values = data.draw(st.lists(small.values, min_size=3, max_size=6)) + listed(schema)
    truth = [small.is_valid(schema, value) for value in values]
    try:
        first = MADE[engine].compile(Constraint("json_schema", json.dumps(schema)))
    except UnsupportedConstraint as error:
        refusal: BadConstraint | None = error if engine in NARROW else None
        told = error.message
    except BadConstraint as error:
        refusal, told = (None if any(truth) else error), error.message
    else:
        compare(engine, first, values, truth, schema)
        return
    assert refusal is not None, told
    assert len(told) > 15


def compare(engine: str, first: Matcher, values: list[Any], truth: list[bool], schema: Any) -> None:
    for value, valid in zip(values, truth, strict=True):
        for text in spelled(value):
            matcher = first.copy()
            taken = matcher.advance_bytes(text.encode()) and matcher.may_stop()
            assert valid or not taken, f"{engine} takes {text}, which is not valid"
        taken = takes_value(first, value, schema)
        assert valid or not taken, f"{engine} takes {value!r}, which is not valid"
        assert taken or not valid or engine in NARROW, f"{engine} does not take {value!r}"
