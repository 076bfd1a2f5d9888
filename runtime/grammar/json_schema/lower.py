"""Lowering: a schema of any draft becomes one that llguidance keeps exactly, and a list of what is then left.

Every keyword is either carried over, or left out and listed in `checks`, so that the language of the result
is never narrower; or it is an annotation by its standard; or the schema is refused with the keyword and its
place. It matches nothing and calls no engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from runtime.grammar.json_schema.keywords import KeywordRules
from runtime.grammar.json_schema.refs import KIND, Place, SchemaDocument, Target, is_metaschema, mistake, show
from runtime.grammar.json_schema.relaxation import Lowered, Owner, Relaxation
from runtime.grammar.json_schema.shapes import check_shapes, shown
from runtime.grammar.json_schema.texts.ecma import spell
from runtime.grammar.json_schema.texts.formats import CHECKED, FORMATS
from runtime.grammar.json_schema.unknown_keywords import MAX_TOLD, unknown_keywords
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

MAX_DEPTH = 600
"""Levels of JSON, references followed: the engine's own recursion has no other bound."""

MAX_NODES = 50_000


ANY_JSON_LADDER = (Relaxation(everything=True),)
"""JSON of the right type: all else is left to the validator."""

LADDER = (
    Relaxation(),
    Relaxation(one_of=True),
    Relaxation(one_of=True, property_counts=True, property_patterns=True),
    Relaxation(one_of=True, property_counts=True, property_patterns=True, siblings=True),
    Relaxation(True, True, True, True, True, True),
    *ANY_JSON_LADDER,
)
"""From exact to "some JSON of the right type": the first that the engine takes is used."""


@dataclass
class Plan:
    """`schema` for the engine; `checks`: place of a schema -> its keywords that the engine does not hold."""

    document: SchemaDocument
    schema: dict[str, Any] = field(default_factory=dict)
    checks: dict[Place, list[str]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    names: dict[str, Place] = field(default_factory=dict)
    """Name under $defs of `schema` -> the place it was made from."""
    whole: bool = False
    """Whether the whole document has to be validated too, besides what `checks` says of its parts."""

    def listed(self) -> tuple[str, ...]:
        return tuple(f"{word} at {show(place)}" for place, words in self.checks.items() for word in words)


def lower(document: SchemaDocument, relaxation: Relaxation, start: Place = ()) -> Plan:
    """The plan for a whole document, or for the schema at `start` in it. Raises BadConstraint or
    UnsupportedConstraint with keyword and place."""
    return _Lowering(document, relaxation).run(start)


class _Lowering(Owner):
    def __init__(self, document: SchemaDocument, relaxation: Relaxation) -> None:
        self._document, self._relaxation = document, relaxation
        self._plan = Plan(document, ignored=document.told[:MAX_TOLD])
        self._names: dict[Place, str] = {}
        self._definitions: dict[str, Lowered] = {}
        self._met: set[Place] = set()
        self._waiting: list[tuple[str, Target]] = []
        self._unseen: list[Target] = []
        self._nodes = 0

    def run(self, start: Place) -> Plan:
        document = self._document
        first: Any = document.root
        for step in start:
            first = first[step]
        root = self.lower_node(start, first, document.base_at(start))
        while self._waiting:  # not by recursion: a chain of references may be long
            name, target = self._waiting.pop(0)
            self._definitions[name] = self.lower_node(target.place, target.node, target.base)
            self._visit_all()
        self._visit_all()
        _check_depth(root, self._definitions)
        self._plan.whole = self._relaxation.everything
        if self._relaxation.everything:
            root = _any_of_types(document)
            self.check((), "the whole schema")
        elif self._definitions:
            root = {} if root is True else root
            if isinstance(root, dict):
                root["$defs"] = self._definitions
        if root is False:
            raise mistake("the schema is false: nothing matches", ())
        self._plan.schema = {} if root is True else root
        return self._plan

    def check(self, place: Place, *words: str) -> None:
        if not words:
            return
        kept = self._plan.checks.setdefault(place, [])
        kept.extend(word for word in words if word not in kept)

    def lower_node(self, place: Place, node: Any, base: str) -> Lowered:
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise mistake(f"a schema is an object or a boolean, not {shown(node)}", place)
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise BadConstraint(f"has more than {MAX_NODES} subschemas", where=KIND, hint="split it")
        return self._object(place, node, base)

    def _object(self, place: Place, node: Mapping[str, Any], base: str) -> Lowered:
        base = self._document.base_at(place) or base
        if self._document.alone(node):
            return self.reference(place, "$ref", node["$ref"], base)
        self._tell_unknown(place, node)
        return KeywordRules(self, self._document, place, node, base, self._relaxation).lower()

    def _tell_unknown(self, place: Place, node: Mapping[str, Any]) -> None:
        told = self._plan.ignored
        if (room := MAX_TOLD - len(told)) > 0:
            lines = islice(unknown_keywords(place, node, self._document.draft), room)
            told.extend(line for line in lines if line not in told)

    def reference(self, place: Place, word: str, reference: Any, base: str) -> Lowered:
        if not isinstance(reference, str):
            raise mistake(f"{word} is not a string", place)
        target = self.target(place, word, reference, base)
        if target is None:
            self.check(place, f"{word} to {reference}")
            return True
        if target.place not in self._names:
            name = f"d{len(self._names)}"
            self._names[target.place] = name
            self._plan.names[name] = target.place
            self._waiting.append((name, target))
        return {"$ref": f"#/$defs/{self._names[target.place]}"}

    def target(self, place: Place, word: str, reference: str, base: str) -> Target | None:
        """None for a metaschema, which the validator knows. Raises UnsupportedConstraint for what is not in
        the document."""
        found = self._document.resolve(reference, base)
        if found is not None:
            return found
        if is_metaschema(reference):
            return None
        raise UnsupportedConstraint(
            f"{word} {reference!r} leads out of the schema; nothing is fetched",
            where=f"{KIND} {show(place)}",
            hint="put what it refers to under $defs",
        )

    def visit(self, place: Place, node: Any, base: str) -> None:
        """Look through a schema that is only validated, later: what cannot be validated is refused."""
        self._unseen.append(Target(place, node, base))

    def _visit_all(self) -> None:
        while self._unseen:
            place, node, base = self._unseen.pop()
            if place in self._met or isinstance(node, bool):
                continue
            self._met.add(place)
            if not isinstance(node, Mapping):
                raise mistake(f"a schema is an object or a boolean, not {shown(node)}", place)
            self._nodes += 1
            if self._nodes > MAX_NODES:
                raise BadConstraint(f"has more than {MAX_NODES} subschemas", where=KIND, hint="split it")
            self._visit_one(place, node, self._document.base_at(place) or base)

    def _visit_one(self, place: Place, node: Mapping[str, Any], base: str) -> None:
        for word in ("$ref", "$dynamicRef", "$recursiveRef"):
            if isinstance(node.get(word), str):
                target = self.target(place, word, node[word], base)
                if target is not None:
                    self._unseen.append(target)
        if self._document.alone(node):
            return
        check_shapes(place, node, self._document.draft)
        for word in ("pattern", "format"):
            if isinstance(node.get(word), str):
                self.text_rule(place, word, node[word])
        for steps, inner in self._document.subschemas(node):
            if steps[0] not in ("$defs", "definitions"):
                self._unseen.append(Target(place + steps, inner, base))

    def text_rule(self, place: Place, word: str, value: str) -> str | None:
        """A `pattern` or `format` as an expression for the engine; None if it has none and is checked."""
        if word == "pattern":
            try:
                spelled = spell(value)
            except BadConstraint as error:
                raise type(error)(error.message, where=f"{KIND} {show(place)}/pattern") from None
            return spelled.rust
        if value in FORMATS:
            return f"^(?:{FORMATS[value]})$"
        if value not in CHECKED:
            self._plan.ignored.append(f"format {value!r} at {show(place)}")
        return None


def _check_depth(root: Lowered, definitions: Mapping[str, Lowered]) -> None:
    """Refuse what would take the engine's recursion too deep: it follows each reference where it first
    stands."""
    entered: set[str] = set()
    stack: list[Iterator[Any]] = [iter((root,))]
    while stack:
        node = next(stack[-1], stack)
        if node is stack:
            stack.pop()
            continue
        if len(stack) > MAX_DEPTH:
            text = f"is nested more than {MAX_DEPTH} levels deep, references followed"
            raise BadConstraint(text, where=KIND, hint="make it flatter")
        if isinstance(node, dict):
            reference = node.get("$ref")
            name = reference.rpartition("/")[2] if isinstance(reference, str) else ""
            inner = list(node.values())
            if name in definitions and name not in entered:
                entered.add(name)
                inner.append(definitions[name])
            stack.append(iter(inner))
        elif isinstance(node, list):
            stack.append(iter(node))


def _any_of_types(document: SchemaDocument) -> Lowered:
    """The widest schema that still says what kind of value comes."""
    root = document.root
    if not isinstance(root, Mapping) or "type" not in root or document.alone(root):
        return True
    names = root["type"] if isinstance(root["type"], list) else [root["type"]]
    return {"type": sorted({"number" if name == "integer" else name for name in names})}  # 1.0 is one too
