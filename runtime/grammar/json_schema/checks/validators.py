"""The validators of the jsonschema library, with the keywords that are read differently here: ECMA patterns,
formats by their standards, decimal multiples, names that are no identifiers, and unevaluated members.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from types import ModuleType
from typing import Any

from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012

from runtime.grammar.json_schema.document import REFERENCES
from runtime.grammar.json_schema.texts.ecma import matches_pattern
from runtime.grammar.json_schema.texts.formats import CHECKED, FORMATS, matches

__all__ = ["ALONE", "DRAFTS", "KEYWORDS", "Unevaluated", "ValidationError", "jsonschema"]

_SLOW = "rfc3987_syntax"
"""Imported by jsonschema if installed; reads a grammar for 2.7 s, here only when a format needs it."""


def _is_valid_syntax(*args: str, **named: str) -> bool:
    return bool(importlib.import_module(_SLOW).is_valid_syntax(*args, **named))


@contextmanager
def _read_later() -> Iterator[None]:
    """Replaces the slow module meanwhile."""
    if _SLOW in sys.modules or importlib.util.find_spec(_SLOW) is None:
        yield
        return
    stand_in = ModuleType(_SLOW)
    stand_in.is_valid_syntax = _is_valid_syntax  # type: ignore[attr-defined]
    sys.modules[_SLOW] = stand_in
    try:
        yield
    finally:
        del sys.modules[_SLOW]


with _read_later():
    import jsonschema  # type: ignore[import-untyped]
    from jsonschema.exceptions import ValidationError  # type: ignore[import-untyped]

DRAFTS: dict[int, tuple[Any, Any]] = {
    4: (jsonschema.Draft4Validator, DRAFT4),
    6: (jsonschema.Draft6Validator, DRAFT6),
    7: (jsonschema.Draft7Validator, DRAFT7),
    2019: (jsonschema.Draft201909Validator, DRAFT201909),
    2020: (jsonschema.Draft202012Validator, DRAFT202012),
}
"""Draft -> the library's validator, and its specification of references."""

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
"""Keywords that can be validated without the rest of their schema -> those they depend on."""


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not matches_pattern(pattern, instance):
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
            if matches_pattern(pattern, name):
                yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional(validator: Any, inner: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not isinstance(instance, Mapping):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name, value in instance.items():
        if name not in named and not any(matches_pattern(pattern, name) for pattern in patterns):
            for error in validator.descend(value, inner, path=name):
                yield ValidationError(f"{name!r}: {error.message}")


KEYWORDS = {
    "pattern": _pattern, "format": _format, "multipleOf": _multiple_of, "patternProperties": _patterns,
    "additionalProperties": _additional,
    "dependencies": jsonschema.Draft7Validator.VALIDATORS["dependencies"],  # which newer drafts lack
}  # fmt: skip


# -- unevaluatedProperties and unevaluatedItems (JSON Schema 2020-12, core, section 11)

Refer = Callable[[Any, str, Mapping[str, Any]], tuple[Any, Any]]
"""(validator, keyword of a reference, schema it is in) -> (validator there, schema there)."""


class Unevaluated:
    """The two keywords, in the library's form. The library's whole would resolve references from the schema
    under validation, which may be a part of a document."""

    def __init__(self, draft: int, refer: Refer) -> None:
        self._draft, self._refer = draft, refer

    def properties(self, validator: Any, rest: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(value, Mapping):
            named = self._members(validator, value, schema, whole=False)
            for name in [name for name in value if name not in named]:
                yield from _all(validator, value[name], rest, name)

    def items(self, validator: Any, rest: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(value, list):
            named = self._members(validator, value, schema, whole=False)
            for index in [index for index in range(len(value)) if index not in named]:
                yield from _all(validator, value[index], rest, index)

    def _members(self, validator: Any, value: Any, schema: Any, *, whole: bool = True) -> set[str | int]:
        """What `schema` evaluates in `value`, which it takes. whole: its unevaluated* keyword counts."""
        if not isinstance(schema, Mapping):
            return set()
        members: set[str | int] = set()
        for word in REFERENCES:
            if isinstance(schema.get(word), str):
                there, target = self._refer(validator, word, schema)
                members |= self._members(there, value, target)
        if isinstance(value, Mapping):
            members |= _named(value, schema, whole)
        else:
            members |= self._numbered(validator, value, schema, whole)
        for part in self._same_value(validator, value, schema):
            members |= self._members(validator, value, part)
        return members

    def _numbered(self, validator: Any, value: list[Any], schema: Mapping[str, Any], whole: bool) -> set[int]:
        listed = isinstance(schema.get("items"), list)  # before 2020-12
        rest = "additionalItems" if listed else "items"
        if rest in schema or (whole and "unevaluatedItems" in schema):
            return set(range(len(value)))
        first = schema["items"] if listed else schema.get("prefixItems", ()) if self._draft >= 2020 else ()
        members = set(range(min(len(first), len(value))))
        if "contains" in schema and self._draft >= 2020:
            members |= {
                index for index, item in enumerate(value) if _takes(validator, item, schema["contains"])
            }
        return members

    @staticmethod
    def _same_value(validator: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
        """The subschemas that apply to the same value and take it."""
        yield from schema.get("allOf", ())
        for word in ("anyOf", "oneOf"):
            yield from (part for part in schema.get(word, ()) if _takes(validator, value, part))
        if "if" in schema:
            holds = _takes(validator, value, schema["if"])
            yield from [schema["if"]] if holds else []
            yield schema.get("then" if holds else "else", True)
        if isinstance(value, Mapping):
            yield from (part for name, part in schema.get("dependentSchemas", {}).items() if name in value)


def _takes(validator: Any, value: Any, schema: Any) -> bool:
    return next(validator.descend(value, schema), None) is None


def _named(value: Mapping[str, Any], schema: Mapping[str, Any], whole: bool) -> set[str]:
    if "additionalProperties" in schema or (whole and "unevaluatedProperties" in schema):
        return set(value)
    patterns = schema.get("patternProperties", {})
    named = schema.get("properties", {})
    return {
        name for name in value if name in named or any(matches_pattern(pattern, name) for pattern in patterns)
    }


def _all(validator: Any, value: Any, rest: Any, step: str | int) -> Iterator[ValidationError]:
    if rest is False:
        yield ValidationError(f"{step!r} is not evaluated")
    else:
        yield from validator.descend(value, rest, path=step)
