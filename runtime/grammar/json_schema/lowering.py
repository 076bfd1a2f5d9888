"""Lowering: the walk over a schema of any draft that makes one which the engine keeps exactly, and a list of
what is left to the validator. The rules for the keywords of one schema object are in `lower.py`.

Each keyword is carried over, or listed in `checks`, so the result is never narrower; or it has no effect by
its standard; or the schema is refused with keyword and path.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from runtime.grammar.json_schema.document import (
    KIND,
    REFERENCES,
    SchemaDocument,
    SchemaPath,
    Target,
    is_metaschema,
    known,
    mistake,
    show,
    unsupported,
)
from runtime.grammar.json_schema.shapes import MAX_IGNORED, check_shapes, shown, unknown_keywords
from runtime.grammar.json_schema.texts.ecma import spell
from runtime.grammar.json_schema.texts.formats import CHECKED, FORMATS
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

MAX_DEPTH = 600
"""Levels of JSON, references followed: the engine's own recursion has no other bound."""

MAX_NODES = 50_000

Lowered = bool | dict[str, Any]


@dataclass(frozen=True)
class Relaxation:
    """Keywords that are left to the validator although the engine might keep them."""

    one_of: bool = False
    property_counts: bool = False
    property_patterns: bool = False
    patterns: bool = False
    numbers: bool = False
    siblings: bool = False
    everything: bool = False


ANY_JSON_LADDER = (Relaxation(everything=True),)
"""JSON of the right type: everything else is left to the validator."""

LADDER = (
    Relaxation(),
    Relaxation(one_of=True),
    Relaxation(one_of=True, property_counts=True, property_patterns=True),
    Relaxation(one_of=True, property_counts=True, property_patterns=True, siblings=True),
    Relaxation(True, True, True, True, True, True),
    *ANY_JSON_LADDER,
)
"""From exact to JSON of the right type; the first that the engine takes is used."""


class Unspelled(UnsupportedConstraint):
    """The schema needs a text that strings without escapes cannot contain."""


@dataclass
class Plan:
    """`schema` for the engine; `checks`: path of a schema -> its keywords that the engine does not keep."""

    document: SchemaDocument
    schema: dict[str, Any] = field(default_factory=dict)
    checks: dict[SchemaPath, list[str]] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    names: dict[str, SchemaPath] = field(default_factory=dict)
    """Name under $defs of `schema` -> its path in the document."""
    whole: bool = False
    """Whether the whole document has to be validated too, besides what `checks` lists."""

    def listed(self) -> tuple[str, ...]:
        return tuple(
            f"{keyword} at {show(path)}" for path, keywords in self.checks.items() for keyword in keywords
        )


class Lowering:
    """`rules`: lowers one schema object. References to `dead` schemas become `false`."""

    def __init__(
        self, document: SchemaDocument, relaxation: Relaxation, rules: Rules, dead: Container[SchemaPath]
    ) -> None:
        self.document, self.relaxation, self._rules, self._dead = document, relaxation, rules, dead
        self._plan = Plan(document, ignored=document.ignored[:MAX_IGNORED])
        self._names: dict[SchemaPath, str] = {}
        self._definitions: dict[str, Lowered] = {}
        self._waiting: list[tuple[str, Target]] = []

    def run(self, start: SchemaPath) -> Plan:
        document = self.document
        if start == ():
            self._check_all()
        root = self.lower_node(start, document.node(start))
        while self._waiting:  # not by recursion: a chain of references may be long
            name, target = self._waiting.pop(0)
            self._definitions[name] = self.lower_node(target.path, target.node)
        _check_depth(root, self._definitions)
        self._plan.whole = self.relaxation.everything
        if self.relaxation.everything:
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

    def check(self, path: SchemaPath, *keywords: str) -> None:
        """Leave `keywords` of the schema at `path` to the validator."""
        if keywords:
            kept = self._plan.checks.setdefault(path, [])
            kept.extend(keyword for keyword in keywords if keyword not in kept)

    def lower_node(self, path: SchemaPath, node: Any) -> Lowered:
        if isinstance(node, bool):
            return node
        if not isinstance(node, Mapping):
            raise mistake(f"a schema is an object or a boolean, not {shown(node)}", path)
        if self.document.alone(node):
            return self.reference(path, "$ref", node["$ref"])
        ignored = self._plan.ignored
        if (left := MAX_IGNORED - len(ignored)) > 0:
            lines = islice(unknown_keywords(path, node, self.document.draft), left)
            ignored.extend(line for line in lines if line not in ignored)
        return self._rules(self, path, node)

    def _check_all(self) -> None:
        """Refuse mistakes, also in schemas that are only validated."""
        for number, (path, node) in enumerate(self.document.reachable()):
            if number >= MAX_NODES:
                raise BadConstraint(f"has more than {MAX_NODES} subschemas", where=KIND, hint="split it")
            for word in REFERENCES:
                if word in node and known(word, self.document.draft):
                    self._check_reference(path, word, node[word])
            if self.document.alone(node):
                continue
            check_shapes(path, node, self.document.draft)
            name = node.get("format")
            if isinstance(name, str) and name not in FORMATS and name not in CHECKED:
                self._plan.ignored.append(f"format {name!r} at {show(path)}")
            if isinstance(node.get("pattern"), str):
                self.text_rule(path, "pattern", node["pattern"])

    def _check_reference(self, path: SchemaPath, word: str, reference: Any) -> None:
        """Refuse what is neither in the document nor a metaschema, which the validator knows."""
        if not isinstance(reference, str):
            raise mistake(f"{word} is not a string", path)
        if word not in self.document.targets[path] and not is_metaschema(reference):
            text = f"{word} {reference!r} leads out of the schema; nothing is fetched"
            raise unsupported(text, path, "put what it refers to under $defs")

    def reference(self, path: SchemaPath, word: str, reference: str) -> Lowered:
        """A reference to a definition of the result; True if only the validator knows it."""
        target = self.document.targets[path].get(word)
        if target is None:
            self.check(path, f"{word} to {reference}")
            return True
        if target.path in self._dead:
            return False
        if target.path not in self._names:
            name = f"d{len(self._names)}"
            self._names[target.path] = name
            self._plan.names[name] = target.path
            self._waiting.append((name, target))
        return {"$ref": f"#/$defs/{self._names[target.path]}"}

    def text_rule(self, path: SchemaPath, word: str, value: str) -> str | None:
        """A `pattern` or `format` as an expression for the engine; None if it has none and is checked."""
        if word == "pattern":
            try:
                return spell(value).rust
            except BadConstraint as error:
                raise type(error)(error.message, where=f"{KIND} {show(path)}/pattern") from None
        return f"^(?:{FORMATS[value]})$" if value in FORMATS else None


Rules = Callable[[Lowering, SchemaPath, Mapping[str, Any]], Lowered]


def _check_depth(root: Lowered, definitions: Mapping[str, Lowered]) -> None:
    """Refuse what would take the engine's recursion too deep: it follows each reference at its first use."""
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
    """The widest schema that still has the right types."""
    root = document.root
    if not isinstance(root, Mapping) or "type" not in root or document.alone(root):
        return True
    names = root["type"] if isinstance(root["type"], list) else [root["type"]]
    return {"type": sorted({"number" if name == "integer" else name for name in names})}  # 1.0 is one too
