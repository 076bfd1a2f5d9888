"""RuntimeChecks: what of a schema is left to validate, for which values, and the validating itself.

A value inside of a document is checked as soon as it closes, against the schemas that hold for it whatever
the rest is (under properties, items, allOf, references); what depends on a choice (anyOf, oneOf, if) is
checked with the value that the choice is about. The whole document is always checked. It knows no bytes and
no engine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing.exceptions import Unresolvable
from referencing.jsonschema import lookup_recursive_ref

from runtime.grammar.json_schema.checks.library import ValidationError, jsonschema
from runtime.grammar.json_schema.checks.unevaluated import Unevaluated
from runtime.grammar.json_schema.checks.validators import ALONE, DRAFTS, OWN
from runtime.grammar.json_schema.lower import Plan
from runtime.grammar.json_schema.refs import IN_PLACE, Place, show
from runtime.grammar.json_schema.shapes import known
from runtime.grammar.json_schema.texts.searching import found
from runtime.protocol.errors import BadConstraint

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


class RuntimeChecks:
    """The checks of one plan. Shared by all matchers of a constraint; thread-safe (its caches only grow)."""

    def __init__(self, plan: Plan) -> None:
        self.document, self._checks = plan.document, plan.checks
        kind, specification = DRAFTS[self.document.draft]
        words = () if self.document.scoped else _REFERENCES
        follow = {word: partial(self._follow, word) for word in words}
        rest = Unevaluated(self.document.draft, self._target)
        unevaluated = {"unevaluatedProperties": rest.properties, "unevaluatedItems": rest.items}
        newer = unevaluated if self.document.draft >= 2019 else {}
        self._kind = jsonschema.validators.extend(kind, {**OWN, **follow, **newer})
        self._registry = REGISTRY.with_resource(
            self.document.base_at(()), specification.create_resource(self.document.root)
        )
        self._places = {id(node): place for place, node in self.document.objects()}
        self._validators: dict[Place, Any] = {}
        self._local = threading.local()
        self._parts: list[Mapping[str, Any]] = []
        self.whole = plan.whole
        self._obligations: dict[tuple[Place, ...], Obligation] = {}
        self._unheld = self._reach(self._dropped())
        # Where a reference depends on the way to it, only the whole document can be validated.
        self._tainted = set() if self.document.scoped else self._find_tainted()
        self.root = self.obligation(((),), whole=plan.whole)

    def _follow(
        self, word: str, validator: Any, reference: str, value: Any, schema: Any
    ) -> Iterator[ValidationError]:
        """`$ref`, resolved as the document resolves it; the library's own way stumbles over odd names."""
        depth = getattr(self._local, "depth", 0)
        if depth >= _MAX_REFERENCES:
            raise RecursionError
        self._local.depth = depth + 1
        try:
            there, target = self._target(validator, word, schema)
            yield from there.descend(value, target)
        finally:
            self._local.depth = depth

    def _target(self, validator: Any, word: str, schema: Mapping[str, Any]) -> tuple[Any, Any]:
        """The schema that the reference under `word` leads to, and a validator that is there."""
        place = None if self.document.scoped else self._places.get(id(schema))
        if place is not None:
            target = self.document.resolve(schema[word], self.document.base_at(place))
            if target is not None:
                return validator, target.node
        resolver = validator._resolver
        there = lookup_recursive_ref(resolver) if word == "$recursiveRef" else resolver.lookup(schema[word])
        return validator.evolve(schema=there.contents, _resolver=there.resolver), there.contents

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
        if (self.whole and place == ()) or place in self._unheld or self.document.alone(node):
            return None
        words = {*self._checks.get(place, ()), *self._choices(place, node)}
        if not words or not words <= ALONE.keys():
            return None
        return words.union(*(ALONE[word] for word in words))

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

    def holds(self, place: Place, value: Any) -> bool:
        """Whether `value` matches all of the schema at `place`; False where that cannot be told."""
        node = self.node(place)
        if not isinstance(node, Mapping):
            return node is not False
        self._local.depth = 0
        try:
            return bool(self._kind(node, registry=self._registry).is_valid(value))
        except (RecursionError, BadConstraint, Unresolvable):
            return False

    def obligation(self, places: tuple[Place, ...], *, whole: bool = False) -> Obligation:
        known = self._obligations.get(places)
        if known is None or whole:
            known = self._obligations[places] = Obligation(self, places, whole=whole)
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
                waiting.extend(reversed(self._same(place)))
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
        return any(node is None or _OF_TEXT & node.keys() for node in self._of_same_value(place))

    def told_apart(self, place: Place) -> frozenset[str] | None:
        """The strings that may fare differently from others under the schema at `place`; None: too many."""
        found: set[str] = set()
        for node in self._of_same_value(place):
            if node is None or _OF_TEXT & node.keys() - {"const", "enum"}:
                return None
            values = [node["const"]] if "const" in node else []
            listed = node.get("enum")
            values += listed if isinstance(listed, list) else ()
            found.update(value for value in values if isinstance(value, str))
        return frozenset(found)

    def _of_same_value(self, place: Place) -> Iterator[Mapping[str, Any] | None]:
        """The schemas that a value under the schema at `place` may be held against; None: one of those of the
        standard, outside of the document."""
        met: set[Place] = {place}
        waiting = [place]
        while waiting:
            here = waiting.pop()
            node = self.node(here)
            if not isinstance(node, Mapping):
                continue
            yield node
            referred = self._referred(here, node)
            if len(referred) < sum(isinstance(node.get(word), str) for word in _REFERENCES):
                yield None
            inner = [here + steps for steps, _ in self.document.subschemas(node) if steps[0] in _SAME_VALUE]
            for after in (*referred, *inner):
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


class Obligation:
    """What one value in a document owes: the schemas it must match when it closes (`places`, maybe none), and
    what its members owe."""

    def __init__(self, runtime: RuntimeChecks, given: tuple[Place, ...], *, whole: bool = False) -> None:
        self._runtime = runtime
        self._same = runtime.closure(given)
        self._all = [place for place in self._same if runtime.is_tainted(place)]
        places = [place for place in self._all if runtime.checked_here(place)]
        self.places = ((),) if whole else tuple(places)
        self.strict = bool(places)
        """Whether the value may be refused though each of its parts is as it should be."""
        self.impossible = any(runtime.node(place) is False for place in self._all)
        nodes = [(place, node) for place in self._all if isinstance(node := runtime.node(place), Mapping)]
        unique = [place for place, _ in nodes if "uniqueItems" in runtime.checks_at(place)]
        self.unique_at = show((*unique[0], "uniqueItems")) if unique else ""
        self.unique = bool(unique)
        """Whether the items of an array have to differ: told as an item closes, while there is a way out."""
        self._name_places = tuple(
            (*place, "propertyNames") for place, _ in nodes if "propertyNames" in runtime.checks_at(place)
        )
        self._names: dict[str, Obligation] = {}
        self._items: dict[int, Obligation] = {}
        self._idle = not self._all

    def member(self, name: str) -> Obligation:
        if self._idle:
            return self._runtime.obligation(()) if self.places else self
        known = self._names.get(name)
        if known is None:
            known = self._runtime.obligation(tuple(self._property_places(name)))
            if len(self._names) < _KEPT_NAMES:
                self._names[name] = known
        return known

    def name_fault(self, name: str) -> str | None:
        """Why an object may have no property of this name."""
        for place in self._name_places:
            fault = self._runtime.fault(place, name)
            if fault is not None:
                return fault
        return None

    def item(self, index: int) -> Obligation:
        if self._idle:
            return self._runtime.obligation(()) if self.places else self
        known = self._items.get(index)
        if known is None:
            known = self._runtime.obligation(tuple(self._item_places(index, self._all)))
            if len(self._items) < _KEPT_NAMES:
                self._items[index] = known
        return known

    def _property_places(self, name: str) -> Iterator[Place]:
        for place in self._all:
            node = self._runtime.node(place)
            if not isinstance(node, Mapping) or self._runtime.document.alone(node):
                continue
            matched = False
            if name in node.get("properties", {}):
                matched = True
                yield (*place, "properties", name)
            for pattern in node.get("patternProperties", {}):
                if found(pattern, name):
                    matched = True
                    yield (*place, "patternProperties", pattern)
            rest = self._rest(node, "additionalProperties", "unevaluatedProperties")
            if not matched and rest:
                yield (*place, rest)

    def _rest(self, node: Mapping[str, Any], word: str, unevaluated: str) -> str:
        """The keyword that holds for what no other names. Where schemas for the same value stand beside it,
        what is unevaluated is known when the whole closes, and validated then."""
        if word in node:
            return word
        if unevaluated not in node or not known(unevaluated, self._runtime.document.draft):
            return ""
        return "" if any(other in node for other in IN_PLACE) else unevaluated

    def _item_places(self, index: int, places: Sequence[Place]) -> Iterator[Place]:
        for place in places:
            node = self._runtime.node(place)
            if not isinstance(node, Mapping) or self._runtime.document.alone(node):
                continue
            items = node.get("items")
            word = "items" if isinstance(items, list) else "prefixItems"
            first = node.get(word, ()) if word == "items" or self._runtime.document.draft >= 2020 else ()
            if index < len(first):
                yield (*place, word, index)
            elif word == "items":
                if rest := self._rest(node, "additionalItems", "unevaluatedItems"):
                    yield (*place, rest)
            elif (rest := self._rest(node, "items", "unevaluatedItems")) and (
                rest == "items" or "contains" not in node
            ):
                yield (*place, rest)

    @property
    def minds_text(self) -> bool:
        """Whether a string may be refused here, as one of several or as any string."""
        return bool(self.places) and (self._reads_text or self._any_text_fault is not None)

    @cached_property
    def _reads_text(self) -> bool:
        return any(map(self._runtime.reads_text, self.places))

    @cached_property
    def told_apart(self) -> frozenset[str] | None:
        """The strings that may fare differently from others here; None: more than can be listed."""
        found = [self._runtime.told_apart(place) for place in self.places]
        if any(texts is None for texts in found):
            return None
        return frozenset().union(*(texts for texts in found if texts is not None))

    @property
    def minds_names(self) -> bool:
        """Whether an object here may be refused a name that it does not have yet."""
        return bool(self._name_places) or (not self._idle and self._runtime.forbids_members)

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
        faults = (self._runtime.fault(place, value) for place in self.places)
        return next((fault for fault in faults if fault is not None), None)
