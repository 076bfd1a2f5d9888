"""RuntimeChecks: which values of a document have to be validated against which subschemas, and the
validation.

A value is checked as soon as it closes, against the schemas that apply to it whatever the rest is (under
properties, items, allOf, references); what depends on a choice (anyOf, oneOf, if) is checked with the value
that the choice applies to. The whole document is always checked.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Container, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from referencing.exceptions import Unresolvable
from referencing.jsonschema import lookup_recursive_ref

from runtime.grammar.json_schema.checks.validators import (
    ALONE,
    DRAFTS,
    KEYWORDS,
    Unevaluated,
    ValidationError,
    jsonschema,
)
from runtime.grammar.json_schema.document import REFERENCES, Paths, SchemaDocument, SchemaPath, show
from runtime.grammar.json_schema.lowering import Plan
from runtime.grammar.json_schema.shapes import item_paths, member_paths
from runtime.protocol.errors import BadConstraint

_CHOICES = ("anyOf", "oneOf")
_SAME_STRING = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else")
_OF_TEXT = {"const", "enum", "format", "maxLength", "minLength", "pattern", "$dynamicRef", "$recursiveRef"}
_DROPPED = (
    "properties", "patternProperties", "additionalProperties", "allOf", "items", "prefixItems",
    "additionalItems",
)  # fmt: skip
_MAX_REFERENCES = 48
"""Nested references that one validation follows: the library recurses, which Python bounds."""


class RuntimeChecks:
    """The checks of one plan, shared by all matchers of a constraint. Thread-safe."""

    def __init__(self, plan: Plan) -> None:
        self.document, self.checks = plan.document, plan.checks
        kind, specification = DRAFTS[self.document.draft]
        keywords = () if self.document.scoped else REFERENCES
        follow = {word: partial(self._follow, word) for word in keywords}
        rest = Unevaluated(self.document.draft, self._target)
        unevaluated = {"unevaluatedProperties": rest.properties, "unevaluatedItems": rest.items}
        newer = unevaluated if self.document.draft >= 2019 else {}
        self._kind = jsonschema.validators.extend(kind, {**KEYWORDS, **follow, **newer})
        self._registry = REGISTRY.with_resource(
            self.document.base_at(()), specification.create_resource(self.document.root)
        )
        self._paths = {id(node): path for path, node in self.document.objects.items()}
        self._validators: dict[SchemaPath, Any] = {}
        self._local = threading.local()
        self._parts: list[Mapping[str, Any]] = []
        self.whole = plan.whole
        self._obligations: dict[Paths, Obligation] = {}
        self._unkept = frozenset(self.closure(self._dropped(), None))
        # Schemas from which a check can be reached. If a reference depends on the way to it, only the whole
        # document can be validated.
        self.tainted = set() if self.document.scoped else self._find_tainted()
        self.root = self.obligation(((),), whole=plan.whole)

    def _follow(
        self, word: str, validator: Any, reference: str, value: Any, schema: Any
    ) -> Iterator[ValidationError]:
        """`$ref`, resolved by the document; the library's resolver fails for odd names."""
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
        """A validator at the schema that the reference under `word` leads to, and that schema."""
        path = None if self.document.scoped else self._paths.get(id(schema))
        if path is not None and word in self.document.targets[path]:
            return validator, self.document.targets[path][word].node
        resolver = validator._resolver
        there = lookup_recursive_ref(resolver) if word == "$recursiveRef" else resolver.lookup(schema[word])
        return validator.evolve(schema=there.contents, _resolver=there.resolver), there.contents

    def _validator(self, path: SchemaPath) -> Any:
        """A validator of what the engine does not keep of the schema at `path`; None for a boolean."""
        schema = self.document.node(path)
        if not isinstance(schema, Mapping):
            return None
        keywords = self._keywords_at(path, schema)
        if keywords is not None:
            schema = {word: schema[word] for word in schema if word in keywords}
            self._parts.append(schema)  # kept alive, since it is known by its id
            self._paths[id(schema)] = path
        return self._kind(schema, registry=self._registry)

    def _keywords_at(self, path: SchemaPath, node: Mapping[str, Any]) -> set[str] | None:
        """The keywords of the schema at `path` that need to be validated there; None = all."""
        if (self.whole and path == ()) or path in self._unkept or self.document.alone(node):
            return None
        keywords = {*self.checks.get(path, ()), *self._choices(path, node)}
        if not keywords or not keywords <= ALONE.keys():
            return None
        return keywords.union(*(ALONE[word] for word in keywords))

    def fault(self, path: SchemaPath, value: Any) -> str | None:
        """Why `value` does not match what the engine leaves of the schema at `path`; None if it does."""
        if path not in self._validators:
            self._validators[path] = self._validator(path)
        validator = self._validators[path]
        if validator is None:
            return f"{show(path)}: the schema is false" if self.document.node(path) is False else None
        self._local.depth = 0
        try:
            error = next(validator.iter_errors(value), None)
        except RecursionError:
            return f"{show(path)}: nested too deeply, or the schema refers to itself without an end"
        except BadConstraint as bad:
            return f"{show(path)}: {bad.message}"
        except Unresolvable as unresolved:
            return f"{show(path)}: {unresolved}"
        if error is None:
            return None
        return f"{show((*path, *error.relative_schema_path))}: {error.message[:200]}"

    def holds(self, path: SchemaPath, value: Any) -> bool:
        """Whether `value` matches all of the schema at `path`; False if that cannot be decided."""
        node = self.document.node(path)
        if not isinstance(node, Mapping):
            return node is not False
        self._local.depth = 0
        try:
            return bool(self._kind(node, registry=self._registry).is_valid(value))
        except (RecursionError, BadConstraint, Unresolvable):
            return False

    def obligation(self, paths: Paths, *, whole: bool = False) -> Obligation:
        known = self._obligations.get(paths)
        if known is None or whole:
            known = self._obligations[paths] = Obligation(self, paths, whole=whole)
        return known

    def closure(self, paths: Paths, keywords: Container[str | int] | None = ("allOf",)) -> Paths:
        """The schemas that those at `paths` lead to, see _after(), themselves included; by default those that
        apply where they do."""
        closed: dict[SchemaPath, None] = {}
        waiting = list(reversed(paths))
        while waiting:
            path = waiting.pop()
            if path not in closed:
                closed[path] = None
                waiting.extend(reversed(self._after(path, keywords)))
        return tuple(closed)

    def _referred(self, path: SchemaPath) -> list[SchemaPath]:
        targets = self.document.targets.get(path, {})
        return [target.path for word, target in targets.items() if word not in self.checks.get(path, ())]

    def _after(self, path: SchemaPath, keywords: Container[str | int] | None = None) -> list[SchemaPath]:
        """The schemas that one leads to: by reference, and as parts under `keywords`, None: any keyword."""
        inside = self.document.parts.get(path, ())
        return self._referred(path) + [
            one for one in inside if keywords is None or one[len(path)] in keywords
        ]

    def _dropped(self) -> Paths:
        """The schemas that the wider grammar leaves out, with the keyword that they are under."""
        dropped: list[SchemaPath] = []
        for path, keywords in self.checks.items():
            if "the whole schema" in keywords:
                return ((),)
            inside = self.document.parts.get(path, ())
            dropped += [one for one in inside if one[len(path)] in _DROPPED and one[len(path)] in keywords]
        return tuple(dropped)

    def _node_or_none(self, path: SchemaPath) -> Any:
        try:
            return self.document.node(path)
        except (KeyError, IndexError, TypeError):
            return None  # a path inside of a schema that was expressed by other keywords

    def _find_tainted(self) -> set[SchemaPath]:
        """The schemas from which a check can be reached."""
        sources: dict[SchemaPath, list[SchemaPath]] = {}
        for path in self.closure(((),), None):
            for inner in self._after(path):
                sources.setdefault(inner, []).append(path)
        tainted = {*self.checks, *self._unkept}
        waiting = list(tainted)
        while waiting:
            for path in sources.get(waiting.pop(), ()):
                if path not in tainted:
                    tainted.add(path)
                    waiting.append(path)
        return tainted

    def checked_here(self, path: SchemaPath) -> bool:
        """Whether a value under the schema at `path` has to be validated when it closes."""
        if self.checks.get(path) or path in self._unkept:
            return True
        node = self.document.node(path)
        if not isinstance(node, Mapping) or self.document.alone(node):
            return False
        return bool(self._choices(path, node))

    def _choices(self, path: SchemaPath, node: Mapping[str, Any]) -> list[str]:
        """The choices of a schema that some check depends on."""
        return [
            word
            for word in _CHOICES
            if isinstance(node.get(word), list)
            and any((*path, word, index) in self.tainted for index in range(len(node[word])))
        ]

    def distinguished(self, path: SchemaPath) -> frozenset[str] | None:
        """The strings that the schema at `path` may treat differently from others; None: too many."""
        strings: set[str] = set()
        for node in self.applied_to_string(path):
            if node is None or _OF_TEXT & node.keys() - {"const", "enum"}:
                return None
            values = [node["const"]] if "const" in node else []
            listed = node.get("enum")
            values += listed if isinstance(listed, list) else ()
            strings.update(value for value in values if isinstance(value, str))
        return frozenset(strings)

    def applied_to_string(self, path: SchemaPath) -> Iterator[Mapping[str, Any] | None]:
        """The schemas that may apply to a string under `path`; None: one outside of the document."""
        seen: set[SchemaPath] = {path}
        waiting = [path]
        while waiting:
            here = waiting.pop()
            node = self.document.objects.get(here)
            if node is None:
                continue
            yield node
            referred = self._referred(here)
            if len(referred) < sum(isinstance(node.get(word), str) for word in REFERENCES):
                yield None
            for after in self._after(here, _SAME_STRING):
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)

    @cached_property
    def forbids_members(self) -> bool:
        """Whether a name may be refused because no value may stand under it."""
        return any(self._node_or_none(path) is False for path in self.tainted)


class Obligation:
    """What has to be checked of one value: the schemas it must match when it closes (`paths`, maybe none),
    and the obligations of its members."""

    def __init__(self, runtime: RuntimeChecks, schemas: Paths, *, whole: bool = False) -> None:
        self._runtime = runtime
        self._all = [path for path in runtime.closure(schemas) if path in runtime.tainted]
        paths = [path for path in self._all if runtime.checked_here(path)]
        self.paths = ((),) if whole else tuple(paths)
        self.strict = bool(paths)
        """Whether the value may be refused though each of its parts is valid."""
        self.impossible = any(runtime.document.node(path) is False for path in self._all)
        objects = [path for path in self._all if isinstance(runtime.document.node(path), Mapping)]
        unique = [path for path in objects if "uniqueItems" in runtime.checks.get(path, ())]
        self.unique_at = show((*unique[0], "uniqueItems")) if unique else ""
        self.unique = bool(unique)
        """Whether the items of an array have to differ; checked as each item closes."""
        self._name_paths = tuple(
            (*path, "propertyNames") for path in objects if "propertyNames" in runtime.checks.get(path, ())
        )
        self._idle = not self._all

    def member(self, name: str) -> Obligation:
        return self._part(member_paths, name)

    def item(self, index: int) -> Obligation:
        return self._part(item_paths, index)

    def _part(
        self, paths_of: Callable[[SchemaDocument, SchemaPath, Any], Iterator[SchemaPath]], key: str | int
    ) -> Obligation:
        if self._idle:
            return self._runtime.obligation(()) if self.paths else self
        document = self._runtime.document
        return self._runtime.obligation(
            tuple(inner for path in self._all for inner in paths_of(document, path, key))
        )

    def name_fault(self, name: str) -> str | None:
        """Why an object may have no property of this name."""
        return self._fault_of(name, self._name_paths)

    @property
    def depends_on_text(self) -> bool:
        """Whether a string may be refused here, as one of several or as any string."""
        return bool(self.paths) and (self._reads_text or self._any_text_fault is not None)

    @cached_property
    def _reads_text(self) -> bool:
        """Whether strings are distinguished."""
        nodes = (node for path in self.paths for node in self._runtime.applied_to_string(path))
        return any(node is None or _OF_TEXT & node.keys() for node in nodes)

    @cached_property
    def distinguished(self) -> frozenset[str] | None:
        """The strings that may be treated differently from others here; None: too many to list."""
        sets = [self._runtime.distinguished(path) for path in self.paths]
        if any(texts is None for texts in sets):
            return None
        return frozenset().union(*(texts for texts in sets if texts is not None))

    @property
    def restricts_names(self) -> bool:
        """Whether an object here may be refused a name that it does not have yet."""
        return bool(self._name_paths) or (not self._idle and self._runtime.forbids_members)

    @cached_property
    def _any_text_fault(self) -> str | None:
        return self._fault_of("", self.paths)

    def fault(self, text: str) -> str | None:
        """Why the JSON in `text` is invalid; None if it is valid."""
        if not self.paths:
            return None
        if text.startswith('"') and not self._reads_text:
            return self._any_text_fault
        try:
            value = json.loads(text)
        except ValueError as error:  # a number of thousands of digits
            return str(error)
        return self._fault_of(value, self.paths)

    def string_fault(self, text: str) -> str | None:
        """fault() of the string `text`."""
        return self._fault_of(text, self.paths) if self._reads_text else self._any_text_fault

    def _fault_of(self, value: Any, paths: Paths) -> str | None:
        faults = (self._runtime.fault(path, value) for path in paths)
        return next((fault for fault in faults if fault is not None), None)
