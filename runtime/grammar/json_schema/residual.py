"""Residual: what of a schema is left to validate, for which values, and the validating itself.

A value inside of a document is checked as soon as it closes, against the schemas that hold for it whatever
the rest is (under properties, items, allOf, references); what depends on a choice (anyOf, oneOf, if) is
checked with the value that the choice is about. The whole document is always checked. It knows no bytes and
no engine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cached_property
from typing import Any

import jsonschema  # type: ignore[import-untyped]
from jsonschema.exceptions import ValidationError  # type: ignore[import-untyped]
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT4, DRAFT6, DRAFT7, DRAFT201909, DRAFT202012

from runtime.grammar.json_schema.formats import CHECKED, FORMATS, matches
from runtime.grammar.json_schema.lower import Plan
from runtime.grammar.json_schema.refs import Place, show
from runtime.grammar.json_schema.searching import found
from runtime.protocol.errors import BadConstraint

_DRAFTS: dict[int, tuple[Any, Any]] = {
    4: (jsonschema.Draft4Validator, DRAFT4),
    6: (jsonschema.Draft6Validator, DRAFT6),
    7: (jsonschema.Draft7Validator, DRAFT7),
    2019: (jsonschema.Draft201909Validator, DRAFT201909),
    2020: (jsonschema.Draft202012Validator, DRAFT202012),
}
_CHOICES = ("anyOf", "oneOf")
_SAME_VALUE = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_OF_TEXT = {"const", "enum", "format", "maxLength", "minLength", "pattern", "$dynamicRef", "$recursiveRef"}
_DROPPED = (
    "properties", "patternProperties", "additionalProperties", "allOf", "items", "prefixItems",
    "additionalItems",
)  # fmt: skip
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_KEPT_NAMES = 256
_MAX_REFERENCES = 48
"""References followed one inside of the other by one validation: the library recurses, and Python's own limit
is met in places that cannot bear it."""
_BESIDE_OTHERS = ("properties", "patternProperties")
_ALONE: dict[str, tuple[str, ...]] = {
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


_OWN = {
    "pattern": _pattern, "format": _format, "multipleOf": _multiple_of, "patternProperties": _patterns,
    "additionalProperties": _additional, "dependencies": _dependencies,
}  # fmt: skip


class Residual:
    """The checks of one plan. Shared by all matchers of a constraint; thread-safe (its caches only grow)."""

    def __init__(self, plan: Plan) -> None:
        self.document, self._checks = plan.document, plan.checks
        kind, specification = _DRAFTS[self.document.draft]
        follow = {} if self.document.scoped else dict.fromkeys(_REFERENCES, self._follow)
        self._kind = jsonschema.validators.extend(kind, {**_OWN, **follow})
        self._registry = REGISTRY.with_resource(
            self.document.base_at(()), specification.create_resource(self.document.root)
        )
        self._places = {id(node): place for place, node in self.document.objects()}
        self._validators: dict[Place, Any] = {}
        self._local = threading.local()
        self._parts: list[Mapping[str, Any]] = []
        self._whole = plan.whole
        self._duties: dict[tuple[Place, ...], Duty] = {}
        self._unheld = self._reach(self._dropped())
        # Where a reference depends on the way to it, only the whole document can be validated.
        self._tainted = set() if self.document.scoped else self._find_tainted()
        self.root = self.duty(((),), whole=plan.whole)

    def _follow(self, validator: Any, reference: str, value: Any, schema: Any) -> Iterator[ValidationError]:
        """`$ref`, resolved as the document resolves it; the library's own way stumbles over odd names."""
        place = self._places.get(id(schema))
        depth = getattr(self._local, "depth", 0)
        if depth >= _MAX_REFERENCES:
            raise RecursionError
        self._local.depth = depth + 1
        try:
            yield from self._beyond(validator, place, reference, value)
        finally:
            self._local.depth = depth

    def _beyond(self, validator: Any, place: Place | None, reference: str, value: Any) -> Iterator[Any]:
        target = None
        if place is not None:
            target = self.document.resolve(reference, self.document.base_at(place))
        if target is None:
            yield from validator._validate_reference(ref=reference, instance=value)
        else:
            yield from validator.descend(value, target.node)

    def _validator(self, place: Place) -> Any:
        """A validator of what the schema at `place` has unheld; None where it takes anything or nothing."""
        schema = self.node(place)
        if not isinstance(schema, Mapping):
            return None
        words = self._words_at(place, schema)
        if words is not None:
            schema = {word: schema[word] for word in schema if word in words}
            self._parts.append(schema)  # kept, for its id stands for it
            self._places[id(schema)] = place
        return self._kind(schema, registry=self._registry)

    def _words_at(self, place: Place, node: Mapping[str, Any]) -> set[str] | None:
        """The keywords of the schema at `place` that need to be validated there; None = all."""
        if (self._whole and place == ()) or place in self._unheld or self.document.alone(node):
            return None
        words = {*self._checks.get(place, ()), *self._choices(place, node)}
        if not words or not words <= _ALONE.keys():
            return None
        return words.union(*(_ALONE[word] for word in words))

    def fault(self, place: Place, value: Any) -> str | None:
        """Why `value` does not match what the schema at `place` has unheld; None if it does."""
        if place not in self._validators:
            self._validators[place] = self._validator(place)
        validator = self._validators[place]
        if validator is None:
            return f"{show(place)}: the schema is false" if self.node(place) is False else None
        self._local.depth = 0
        try:
            error = next(validator.iter_errors(value), None)
        except RecursionError:
            return f"{show(place)}: nested too deeply, or the schema refers to itself without an end"
        except BadConstraint as bad:
            return f"{show(place)}: {bad.message}"
        except Unresolvable as unresolved:
            return f"{show(place)}: {unresolved}"
        if error is None:
            return None
        return f"{show((*place, *error.relative_schema_path))}: {error.message[:200]}"

    def duty(self, places: tuple[Place, ...], *, whole: bool = False) -> Duty:
        known = self._duties.get(places)
        if known is None or whole:
            known = self._duties[places] = Duty(self, places, whole=whole)
        return known

    def closure(self, places: tuple[Place, ...]) -> tuple[Place, ...]:
        """The schemas that hold for a value for which those at `places` hold: references and allOf
        followed."""
        found: dict[Place, None] = {}
        waiting = list(reversed(places))
        while waiting:
            place = waiting.pop()
            if place not in found:
                found[place] = None
                waiting.extend(self._same(place))
        return tuple(found)

    def node(self, place: Place) -> Any:
        node: Any = self.document.root
        for step in place:
            node = node[step]
        return node

    def _same(self, place: Place) -> list[Place]:
        node = self.node(place)
        if not isinstance(node, Mapping):
            return []
        found = self._referred(place, node)
        if not self.document.alone(node) and isinstance(node.get("allOf"), list):
            found.extend((*place, "allOf", index) for index in range(len(node["allOf"])))
        return found

    def _referred(self, place: Place, node: Mapping[str, Any]) -> list[Place]:
        found = []
        for word in _REFERENCES:
            reference = node.get(word)
            if isinstance(reference, str) and word not in self._checks.get(place, ()):
                target = self.document.resolve(reference, self.document.base_at(place))
                if target is not None:
                    found.append(target.place)
        return found

    def _after(self, place: Place) -> list[Place]:
        """The schemas that one leads to, by reference or as a part."""
        node = self.node(place)
        if not isinstance(node, Mapping):
            return []
        after = self._referred(place, node)
        if not self.document.alone(node):
            after += [place + steps for steps, _ in self.document.subschemas(node)]
        return after

    def _reach(self, places: list[Place]) -> dict[Place, list[Place]]:
        """All that `places` lead to -> the places they were come to from."""
        sources: dict[Place, list[Place]] = {place: [] for place in places}
        waiting = list(places)
        while waiting:
            place = waiting.pop()
            for inner in self._after(place):
                if inner not in sources:
                    sources[inner] = []
                    waiting.append(inner)
                sources[inner].append(place)
        return sources

    def _dropped(self) -> list[Place]:
        """The schemas of which the wider grammar holds nothing, since the keyword they are under was left
        out."""
        found: list[Place] = []
        for place, words in self._checks.items():
            if "the whole schema" in words:
                return [()]
            node = self._node_or_none(place)
            if isinstance(node, Mapping):
                inner = self.document.subschemas(node)
                found.extend(
                    place + steps for steps, _ in inner if steps[0] in words and steps[0] in _DROPPED
                )
        return found

    def _node_or_none(self, place: Place) -> Any:
        try:
            return self.node(place)
        except (KeyError, IndexError, TypeError):
            return None  # a place inside of a schema that was said in other words

    def _find_tainted(self) -> set[Place]:
        """The schemas from which a check can be reached."""
        sources = self._reach([()])
        tainted = {*self._checks, *self._unheld}
        waiting = list(tainted)
        while waiting:
            for place in sources.get(waiting.pop(), ()):
                if place not in tainted:
                    tainted.add(place)
                    waiting.append(place)
        return tainted

    def checked_here(self, place: Place) -> bool:
        """Whether a value under the schema at `place` has to be validated when it closes."""
        if self._checks.get(place) or place in self._unheld:
            return True
        node = self.node(place)
        if not isinstance(node, Mapping) or self.document.alone(node):
            return False
        return bool(self._choices(place, node))

    def _choices(self, place: Place, node: Mapping[str, Any]) -> list[str]:
        """The choices of a schema that some check depends on."""
        return [
            word
            for word in _CHOICES
            if isinstance(node.get(word), list)
            and any((*place, word, index) in self._tainted for index in range(len(node[word])))
        ]

    def reads_text(self, place: Place) -> bool:
        """Whether the schema at `place` tells one string from another."""
        return any(_OF_TEXT & node.keys() for node in self._of_same_value(place))

    def told_apart(self, place: Place) -> frozenset[str] | None:
        """The strings that may fare differently from others under the schema at `place`; None: too many."""
        found: set[str] = set()
        for node in self._of_same_value(place):
            if _OF_TEXT & node.keys() - {"const", "enum"}:
                return None
            values = [node["const"]] if "const" in node else []
            listed = node.get("enum")
            values += listed if isinstance(listed, list) else ()
            found.update(value for value in values if isinstance(value, str))
        return frozenset(found)

    def _of_same_value(self, place: Place) -> Iterator[Mapping[str, Any]]:
        """The schemas that a value under the schema at `place` may be held against."""
        met: set[Place] = {place}
        waiting = [place]
        while waiting:
            here = waiting.pop()
            node = self.node(here)
            if not isinstance(node, Mapping):
                continue
            yield node
            inner = [here + steps for steps, _ in self.document.subschemas(node) if steps[0] in _SAME_VALUE]
            for after in (*self._referred(here, node), *inner):
                if after not in met:
                    met.add(after)
                    waiting.append(after)

    @cached_property
    def forbids_members(self) -> bool:
        """Whether a name may be refused because no value may stand under it."""
        return any(self._node_or_none(place) is False for place in self._tainted)

    def checks_at(self, place: Place) -> list[str]:
        return self._checks.get(place, [])

    def is_tainted(self, place: Place) -> bool:
        return place in self._tainted


class Duty:
    """What one value in a document owes: the schemas it must match when it closes (`places`, maybe none), and
    what its members owe."""

    def __init__(self, residual: Residual, given: tuple[Place, ...], *, whole: bool = False) -> None:
        self._residual = residual
        self._all = [place for place in residual.closure(given) if residual.is_tainted(place)]
        places = [place for place in self._all if residual.checked_here(place)]
        self.places = ((),) if whole else tuple(places)
        self.strict = bool(places)
        """Whether the value may be refused though each of its parts is as it should be."""
        self.impossible = any(residual.node(place) is False for place in self._all)
        nodes = [(place, node) for place in self._all if isinstance(node := residual.node(place), Mapping)]
        unique = [place for place, _ in nodes if "uniqueItems" in residual.checks_at(place)]
        self.unique_at = show((*unique[0], "uniqueItems")) if unique else ""
        self.unique = bool(unique)
        """Whether the items of an array have to differ: told as an item closes, while there is a way out."""
        self._name_places = tuple(
            (*place, "propertyNames") for place, _ in nodes if "propertyNames" in residual.checks_at(place)
        )
        self._names: dict[str, Duty] = {}
        self._items: dict[int, Duty] = {}
        self._idle = not self._all

    def member(self, name: str) -> Duty:
        if self._idle:
            return self._residual.duty(()) if self.places else self
        known = self._names.get(name)
        if known is None:
            known = self._residual.duty(tuple(self._property_places(name)))
            if len(self._names) < _KEPT_NAMES:
                self._names[name] = known
        return known

    def name_fault(self, name: str) -> str | None:
        """Why an object may have no property of this name."""
        for place in self._name_places:
            fault = self._residual.fault(place, name)
            if fault is not None:
                return fault
        return None

    def item(self, index: int) -> Duty:
        if self._idle:
            return self._residual.duty(()) if self.places else self
        known = self._items.get(index)
        if known is None:
            known = self._residual.duty(tuple(self._item_places(index)))
            if len(self._items) < _KEPT_NAMES:
                self._items[index] = known
        return known

    def _property_places(self, name: str) -> Iterator[Place]:
        for place in self._all:
            node = self._residual.node(place)
            if not isinstance(node, Mapping) or self._residual.document.alone(node):
                continue
            matched = False
            if name in node.get("properties", {}):
                matched = True
                yield (*place, "properties", name)
            for pattern in node.get("patternProperties", {}):
                if found(pattern, name):
                    matched = True
                    yield (*place, "patternProperties", pattern)
            if not matched and "additionalProperties" in node:
                yield (*place, "additionalProperties")

    def _item_places(self, index: int) -> Iterator[Place]:
        for place in self._all:
            node = self._residual.node(place)
            if not isinstance(node, Mapping) or self._residual.document.alone(node):
                continue
            items = node.get("items")
            word = "items" if isinstance(items, list) else "prefixItems"
            first = node.get(word, ()) if word == "items" or self._residual.document.draft >= 2020 else ()
            if index < len(first):
                yield (*place, word, index)
            elif word == "items":
                if "additionalItems" in node:
                    yield (*place, "additionalItems")
            elif items is not None:
                yield (*place, "items")

    @property
    def minds_text(self) -> bool:
        """Whether a string may be refused here, as one of several or as any string."""
        return bool(self.places) and (self._reads_text or self._any_text_fault is not None)

    @cached_property
    def _reads_text(self) -> bool:
        return any(map(self._residual.reads_text, self.places))

    @cached_property
    def told_apart(self) -> frozenset[str] | None:
        """The strings that may fare differently from others here; None: more than can be listed."""
        found = [self._residual.told_apart(place) for place in self.places]
        if any(texts is None for texts in found):
            return None
        return frozenset().union(*(texts for texts in found if texts is not None))

    @property
    def minds_names(self) -> bool:
        """Whether an object here may be refused a name that it does not have yet."""
        return bool(self._name_places) or (not self._idle and self._residual.forbids_members)

    @cached_property
    def _any_text_fault(self) -> str | None:
        return self._fault_of("")

    def fault(self, text: str) -> str | None:
        """Why the JSON in `text` does not do; None if it does, or nothing is owed."""
        if not self.places:
            return None
        if text.startswith('"') and not self._reads_text:
            return self._any_text_fault
        try:
            value = json.loads(text)
        except ValueError as error:  # a number of thousands of digits
            return str(error)
        return self._fault_of(value)

    def string_fault(self, text: str) -> str | None:
        """What fault() would say of the string `text`."""
        return self._fault_of(text) if self._reads_text else self._any_text_fault

    def _fault_of(self, value: Any) -> str | None:
        faults = (self._residual.fault(place, value) for place in self.places)
        return next((fault for fault in faults if fault is not None), None)
