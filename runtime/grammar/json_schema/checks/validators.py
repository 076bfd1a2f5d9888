"""The jsonschema library's validators, with the keywords that this product reads otherwise than it: ECMA
patterns, formats by their standards, decimal multiples, names that are no identifiers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012

from runtime.grammar.json_schema.checks.library import ValidationError, jsonschema
from runtime.grammar.json_schema.texts.formats import CHECKED, FORMATS, matches
from runtime.grammar.json_schema.texts.searching import found

DRAFTS: dict[int, tuple[Any, Any]] = {
    4: (jsonschema.Draft4Validator, DRAFT4),
    6: (jsonschema.Draft6Validator, DRAFT6),
    7: (jsonschema.Draft7Validator, DRAFT7),
    2019: (jsonschema.Draft201909Validator, DRAFT201909),
    2020: (jsonschema.Draft202012Validator, DRAFT202012),
}
"""Draft -> the library's validator, and its reading of references."""

_BESIDE_OTHERS = ("properties", "patternProperties")
ALONE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("anyOf", "oneOf", "allOf", "not", "uniqueItems", "propertyNames"), ()),
    **dict.fromkeys(("pattern", "format"), ()),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas", "multipleOf", "required"), ()),
    **dict.fromkeys(("minProperties", "maxProperties", "enum", "const", "$ref", "patternProperties"), ()),
    **dict.fromkeys(("if", "then", "else"), ("if", "then", "else")),
    **dict.fromkeys(("contains", "minContains", "maxContains"), ("contains", "minContains", "maxContains")),
    "properties": _BESIDE_OTHERS,
    "additionalProperties": _BESIDE_OTHERS,
    "minimum": ("exclusiveMinimum",), "exclusiveMinimum": ("minimum",),
    "maximum": ("exclusiveMaximum",), "exclusiveMaximum": ("maximum",),
}  # fmt: skip
"""Keywords that can be validated without the rest of their schema -> those they are read with."""


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not found(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _format(validator: Any, name: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, str):
        return
    if (name in FORMATS or name in CHECKED) and not matches(name, instance):
        yield ValidationError(f"{instance!r} is not a {name}")


def _multiple_of(validator: Any, divisor: float, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, bool) or not isinstance(instance, (int, float)):
        return
    try:
        whole = (Fraction(repr(instance)) / Fraction(repr(divisor))).denominator == 1
    except ValueError:  # infinite: a number too large for a float
        whole = False
    if not whole:
        yield ValidationError(f"{instance!r} is not a multiple of {divisor!r}")


def _patterns(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, Mapping):
        return
    for pattern, inner in patterns.items():
        for name, value in instance.items():
            if found(pattern, name):
                yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional(validator: Any, inner: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, Mapping):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, value in instance.items():
        if name not in named and not any(found(pattern, name) for pattern in patterns):
            for error in validator.descend(value, inner, path=name):
                yield ValidationError(f"{name!r}: {error.message}")


def _dependencies(validator: Any, named: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, Mapping):
        return
    for name, needed in named.items():
        if name not in instance:
            continue
        if isinstance(needed, list):
            yield from (
                ValidationError(f"{one!r} is needed by {name!r}") for one in needed if one not in instance
            )
        else:
            yield from validator.descend(instance, needed, schema_path=name)


OWN = {
    "pattern": _pattern, "format": _format, "multipleOf": _multiple_of, "patternProperties": _patterns,
    "additionalProperties": _additional, "dependencies": _dependencies,
}  # fmt: skip
