"""Alternatives: a lowered schema as a list of plain ones, of which a value has to match one.

References are followed, `allOf` is said as one schema, `anyOf` and `oneOf` become a list. What a plain schema
asks of a value's members stays as it was written. It builds no language.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from runtime.grammar.json_schema.lower import Plan
from runtime.grammar.json_schema.refs import KIND, Place, show
from runtime.grammar.json_schema.widen import Lowered
from runtime.protocol.errors import UnsupportedConstraint

MOST = 64
"""Alternatives of one value; more are refused."""

_JOINING = ("allOf", "anyOf", "oneOf", "$ref", "$defs")
_UPPER = ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties")
_LOWER = ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties")
_ALL_TYPES = frozenset({"array", "boolean", "null", "number", "object", "string"})


class Plain(NamedTuple):
    """words: a schema without _JOINING. place: where what it asks is validated; known: whether the places of
    its parts lie below `place` as they are written. through: the definitions that led here."""

    words: dict[str, Any]
    place: Place
    known: bool
    through: frozenset[str]


class Alternatives:
    """Of the schemas of one plan. check(place, word): leaves a keyword to the validator."""

    def __init__(self, plan: Plan, check: Callable[[Place, str], None]) -> None:
        self._definitions: Mapping[str, Lowered] = plan.schema.get("$defs", {})
        self._names, self._root = plan.names, plan.document.root
        self._check = check

    def of(self, schema: Lowered, place: Place, known: bool, through: frozenset[str]) -> list[Plain]:
        """Raises UnsupportedConstraint for a schema that leads back to itself, or to too many."""
        if schema is False:
            return []
        if schema is True:
            return [Plain({}, place, known, through)]
        own = {word: value for word, value in schema.items() if word not in _JOINING}
        parts: list[list[Plain]] = [[Plain(own, place, known, through)]] if own else []
        alone = not own and sum(word in schema for word in _JOINING[:4]) == 1
        parts.extend(self.of(inner, place, False, through) for inner in schema.get("allOf", ()))
        parts.extend(
            self._options(schema[word], word, place, known and alone, through)
            for word in ("anyOf", "oneOf")
            if word in schema
        )
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            parts.append(self._definition(name, place, alone, through))
        if not parts:
            return [Plain({}, place, known, through)]
        if len(parts) == 1:
            return parts[0]
        found = []
        for chosen in itertools.islice(itertools.product(*parts), MOST + 1):
            joined = self._joined(chosen, place)
            if joined is not None:
                found.append(joined)
        return self._few(found, place)

    def _few(self, found: list[Plain], place: Place) -> list[Plain]:
        if len(found) > MOST:
            raise UnsupportedConstraint(
                f"a value has more than {MOST} alternatives", where=f"{KIND} {show(place)}"
            )
        return found

    def _definition(self, name: str, place: Place, alone: bool, through: frozenset[str]) -> list[Plain]:
        target = self._names.get(name, place)
        if name in through:
            raise UnsupportedConstraint(
                "$ref leads back to where it stands: a language of any depth is not regular",
                where=f"{KIND} {show(target)}",
                hint='grammar backend "auto" keeps it',
            )
        return self.of(self._definitions[name], target if alone else place, alone, through | {name})

    def _options(
        self, options: list[Lowered], word: str, place: Place, known: bool, through: frozenset[str]
    ) -> list[Plain]:
        found: list[Plain] = []
        groups: list[list[Plain]] = []
        for number, inner in enumerate(options):
            below = (*place, word, number)
            own = known and self.exists(below)
            group = self.of(inner, below if own else place, own, through)
            groups.append(group)
            found += group
        if word == "oneOf" and not all(
            apart(a.words, b.words)
            for one, other in itertools.combinations(groups, 2)
            for a in one
            for b in other
        ):
            self._check(place, "oneOf")
        return self._few(found, place)

    def exists(self, place: Place) -> bool:
        """Whether the document has something at `place`."""
        node = self._root
        for step in place:
            if isinstance(node, Mapping) and step in node:
                node = node[step]
                continue
            if not isinstance(node, list) or not isinstance(step, int) or step >= len(node):
                return False
            node = node[step]
        return True

    def _joined(self, parts: tuple[Plain, ...], place: Place) -> Plain | None:
        """The schema of values that match all of `parts`; None if its types leave none."""
        words: dict[str, Any] = {}
        for part in parts:
            words = self._both(words, part.words, place)
        if words.get("type") == []:
            return None
        return Plain(words, place, False, frozenset().union(*(part.through for part in parts)))

    def _both(self, one: dict[str, Any], other: dict[str, Any], place: Place) -> dict[str, Any]:
        if not one or not other:
            return dict(one or other)
        out = {**one, **other}
        for word in one.keys() & other.keys():
            out[word] = self._both_of(word, one[word], other[word], place)
        if _OBJECT & one.keys() and _OBJECT & other.keys():
            out.update(self._both_objects(one, other, place))
        if _ARRAY & one.keys() and _ARRAY & other.keys():
            out.update(_both_arrays(one, other))
        return out

    def _both_of(self, word: str, one: Any, other: Any, place: Place) -> Any:
        if one == other:
            return one
        if word in _UPPER:
            return min(one, other)
        if word in _LOWER:
            return max(one, other)
        if word == "type":
            return _common_types(one, other)
        if word == "enum":
            texts = {json.dumps(value, sort_keys=True) for value in other}
            return [value for value in one if json.dumps(value, sort_keys=True) in texts]
        if word == "required":
            return list(dict.fromkeys([*one, *other]))
        if word not in _OBJECT and word not in _ARRAY:
            self._check(place, word)  # a second pattern, a second divisor
        return one

    def _both_objects(self, one: dict[str, Any], other: dict[str, Any], place: Place) -> dict[str, Any]:
        if "patternProperties" in one or "patternProperties" in other:
            raise UnsupportedConstraint(
                "patternProperties under allOf are not joined", where=f"{KIND} {show(place)}"
            )
        names = dict.fromkeys([*one.get("properties", {}), *other.get("properties", {})])
        rest = [schema.get("additionalProperties", True) for schema in (one, other)]
        joined = {
            name: both(
                one.get("properties", {}).get(name, rest[0]), other.get("properties", {}).get(name, rest[1])
            )
            for name in names
        }
        out: dict[str, Any] = {"properties": joined} if joined else {}
        if rest != [True, True]:
            out["additionalProperties"] = both(*rest)
        return out


_OBJECT = {"properties", "additionalProperties", "patternProperties"}
_ARRAY = {"prefixItems", "items"}


def both(one: Lowered, other: Lowered) -> Lowered:
    """The schema of what matches both."""
    if one is False or other is False:
        return False
    if one is True or one == other:
        return other
    return one if other is True else {"allOf": [one, other]}


def _both_arrays(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    first, second = one.get("prefixItems", []), other.get("prefixItems", [])
    rest = one.get("items", True), other.get("items", True)
    joined = [
        both(first[at] if at < len(first) else rest[0], second[at] if at < len(second) else rest[1])
        for at in range(max(len(first), len(second)))
    ]
    out: dict[str, Any] = {"prefixItems": joined} if joined else {}
    if rest != (True, True):
        out["items"] = both(*rest)
    return out


def types_of(words: Mapping[str, Any]) -> list[str]:
    """The types that a plain schema allows, integer where no other number is."""
    named = words.get("type")
    names = [named] if isinstance(named, str) else list(_ALL_TYPES) if named is None else named
    return sorted(name for name in names if not (name == "integer" and "number" in names))


def _common_types(one: Any, other: Any) -> list[str]:
    first, second = set(types_of({"type": one})), set(types_of({"type": other}))
    common = first & second
    if "integer" in first | second and "number" in first | second:
        common |= {"integer"} - ({"integer"} if "number" in common else set())
    return sorted(common)


def apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether no value matches both, where that is easy to see."""
    first, second = set(_kinds(one)), set(_kinds(other))
    common = first & second
    if not common:
        return True
    if "enum" in one and "enum" in other:
        texts = {json.dumps(value, sort_keys=True) for value in one["enum"]}
        if not any(json.dumps(value, sort_keys=True) in texts for value in other["enum"]):
            numbers = [v for v in (*one["enum"], *other["enum"]) if isinstance(v, (int, float, list, dict))]
            return not numbers
    if common == {"object"}:
        names = set(one.get("required", ())) & set(other.get("required", ()))
        parts = one.get("properties", {}), other.get("properties", {})
        return any(
            isinstance(a := parts[0].get(name), dict)
            and isinstance(b := parts[1].get(name), dict)
            and not (a.keys() | b.keys()) & set(_JOINING)
            and not ("object" in _kinds(a) and "object" in _kinds(b))
            and apart(a, b)
            for name in names
        )
    return False


def _kinds(words: Mapping[str, Any]) -> list[str]:
    if "enum" in words:
        found = {_kind_of(value) for value in words["enum"]}
        if "type" not in words:
            return sorted(found)
    return ["number" if name == "integer" else name for name in types_of(words)]


def _kind_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case None:
            return "null"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
        case _:
            return "number"
