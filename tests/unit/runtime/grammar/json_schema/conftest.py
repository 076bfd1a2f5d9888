"""Small schemas and small values, dense enough that both verdicts are common."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import strategies as st

from runtime.grammar.base import GrammarBackend
from runtime.grammar.byte_matcher import BYTES, ByteMatcher
from runtime.grammar.table import make_backend
from runtime.protocol.constraint import Constraint

NAMES = ["a", "b", "ab", "c d", "é"]
STRINGS = ["", "a", "b", "ab", "aab", "é", 'q"\\', "x\ny"]

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([0.5, 1.5, -2.25, 1.0, 1e3]),
    st.sampled_from(STRINGS),
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)
counts = st.integers(0, 3)
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]


def some(**keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


leaves = st.one_of(
    st.booleans(),
    some(type=st.sampled_from(TYPES) | st.lists(st.sampled_from(TYPES), min_size=1, max_size=3, unique=True)),
    some(type=st.sampled_from(["integer", "number"]), minimum=st.integers(-3, 3), maximum=st.integers(-3, 5),
         exclusiveMinimum=st.integers(-3, 3), multipleOf=st.sampled_from([1, 2, 0.5])),
    some(type=st.just("string"), minLength=counts, maxLength=counts,
         pattern=st.sampled_from(["^a", "b$", "^(a|b)*$", "^[^a]", "a", "^(?!b)", "é"])),
    st.builds(lambda items: {"enum": items}, st.lists(values, min_size=1, max_size=4)),
    st.builds(
        lambda items, rest: {"enum": items, **rest},
        st.lists(values, min_size=1, max_size=4),
        some(pattern=st.sampled_from(["^a", "b$", "[0-9]"]), minLength=counts, maxLength=counts,
             minimum=counts, minItems=counts, minProperties=counts, required=st.just(["a"]),
             additionalProperties=st.booleans(), items=st.sampled_from([False, {"type": "integer"}]),
             type=st.sampled_from(TYPES)),
    ),
    st.builds(lambda item: {"const": item}, values),
)  # fmt: skip


def _grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    branches = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        some(type=st.just("object"), properties=named, required=st.lists(st.sampled_from(NAMES), max_size=2,
        unique=True),
             additionalProperties=inner, minProperties=counts, maxProperties=counts,
             patternProperties=st.dictionaries(st.sampled_from(["^a", "b", "é$"]), inner, max_size=2),
             propertyNames=st.sampled_from([{"maxLength": 1}, {"pattern": "a"}, {"enum": ["a", "b"]}]),
             dependentRequired=st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from(NAMES),
             max_size=2), max_size=2), unevaluatedProperties=inner),
        some(type=st.just("array"), items=inner, prefixItems=branches, minItems=counts, maxItems=counts,
             uniqueItems=st.booleans(), contains=inner, minContains=counts, unevaluatedItems=inner),
        some(allOf=branches), some(anyOf=branches), some(oneOf=branches), some(**{"not": inner}),
        some(**{"if": inner, "then": inner, "else": inner}),
        some(type=st.sampled_from(TYPES), anyOf=branches, properties=named),
        some(type=st.sampled_from(TYPES), oneOf=branches, allOf=branches),
    )  # fmt: skip


schemas: st.SearchStrategy[Any] = st.recursive(leaves, _grow, max_leaves=6).filter(
    lambda schema: isinstance(schema, dict)
)


@cache
def made(backend: str, **options: Any) -> GrammarBackend:
    return make_backend(backend, BYTES, **options)


class Small:
    """Strategies, and the verdicts of a matcher and of a validator."""

    schemas, values, leaves, names = schemas, values, leaves, NAMES

    @staticmethod
    def matcher(schema: Any, backend: str = "auto", **options: Any) -> ByteMatcher:
        constraint = Constraint("json_schema", json.dumps(schema)).verify()
        return ByteMatcher(made(backend, **options).compile(constraint))

    @staticmethod
    def accepts(face: ByteMatcher, text: str) -> bool:
        return all(face.advance(byte) for byte in text.encode()) and face.may_stop()

    @classmethod
    def shortest(cls, value: Any) -> Any:
        """The value as masks offer it: a whole number without a fraction."""
        match value:
            case float() if value.is_integer():
                return int(value)
            case list():
                return [cls.shortest(one) for one in value]
            case dict():
                return {name: cls.shortest(one) for name, one in value.items()}
        return value

    @staticmethod
    def is_valid(schema: Any, value: Any) -> bool:
        return bool(jsonschema.Draft202012Validator(schema).is_valid(value))


@pytest.fixture(scope="session")
def small() -> type[Small]:
    return Small
