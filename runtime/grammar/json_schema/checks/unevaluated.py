"""Which members of a value are evaluated by a schema, for `unevaluatedProperties` and `unevaluatedItems`
(JSON Schema 2020-12, core, section 11).

The library's own reading of these resolves references from the schema under validation, which may be a part
of a document. It knows documents and the library's validators, and no grammar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from runtime.grammar.json_schema.checks.library import ValidationError
from runtime.grammar.json_schema.texts.searching import found

Refer = Callable[[Any, str, Mapping[str, Any]], tuple[Any, Any]]
"""(validator, keyword of a reference, schema it stands in) -> (validator there, schema there)."""


class Unevaluated:
    """The two keywords as the library calls keywords. draft: of the document; `refer` resolves references."""

    def __init__(self, draft: int, refer: Refer) -> None:
        self._draft, self._refer = draft, refer

    def properties(self, validator: Any, rest: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(value, Mapping):
            named = self._members(validator, value, schema, own=False)
            for name in [name for name in value if name not in named]:
                yield from _all(validator, value[name], rest, name)

    def items(self, validator: Any, rest: Any, value: Any, schema: Any) -> Iterator[ValidationError]:
        if isinstance(value, list):
            named = self._members(validator, value, schema, own=False)
            for index in [index for index in range(len(value)) if index not in named]:
                yield from _all(validator, value[index], rest, index)

    def _members(self, validator: Any, value: Any, schema: Any, *, own: bool = True) -> set[str | int]:
        """The names or indices in `value` that `schema`, which takes it, evaluates. own: its unevaluated*
        keyword counts."""
        if not isinstance(schema, Mapping):
            return set()
        members: set[str | int] = set()
        for word in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(schema.get(word), str):
                there, target = self._refer(validator, word, schema)
                members |= self._members(there, value, target)
        if isinstance(value, Mapping):
            members |= _named(value, schema, own)
        else:
            members |= self._numbered(validator, value, schema, own)
        for part in self._in_place(validator, value, schema):
            members |= self._members(validator, value, part)
        return members

    def _numbered(self, validator: Any, value: list[Any], schema: Mapping[str, Any], own: bool) -> set[int]:
        listed = isinstance(schema.get("items"), list)  # before 2020-12
        rest = "additionalItems" if listed else "items"
        if rest in schema or (own and "unevaluatedItems" in schema):
            return set(range(len(value)))
        first = schema["items"] if listed else schema.get("prefixItems", ()) if self._draft >= 2020 else ()
        members = set(range(min(len(first), len(value))))
        if "contains" in schema and self._draft >= 2020:
            members |= {
                index for index, item in enumerate(value) if _takes(validator, item, schema["contains"])
            }
        return members

    @staticmethod
    def _in_place(validator: Any, value: Any, schema: Mapping[str, Any]) -> Iterator[Any]:
        """The schemas inside of `schema` that are for the same value and take it."""
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


def _named(value: Mapping[str, Any], schema: Mapping[str, Any], own: bool) -> set[str]:
    if "additionalProperties" in schema or (own and "unevaluatedProperties" in schema):
        return set(value)
    patterns = schema.get("patternProperties", {})
    named = schema.get("properties", {})
    return {name for name in value if name in named or any(found(pattern, name) for pattern in patterns)}


def _all(validator: Any, value: Any, rest: Any, step: str | int) -> Iterator[ValidationError]:
    if rest is False:
        yield ValidationError(f"{step!r} is not evaluated")
    else:
        yield from validator.descend(value, rest, path=step)
