"""JSON schemas by llguidance: the narrowest language that the library takes, and checks for what it lacks.

A schema is lowered to what the library keeps exactly. If the library refuses that, more is left to the
validator, step by step, down to JSON of the right type. For a schema that nothing matches the innermost cause
is reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from runtime.grammar.base import Matcher, Origin
from runtime.grammar.json_schema.checks.checked import CheckedMatcher, ClosingTokens
from runtime.grammar.json_schema.checks.runtime_checks import RuntimeChecks
from runtime.grammar.json_schema.checks.tracker import JsonTracker
from runtime.grammar.json_schema.document import ESCAPES, KIND, SchemaDocument, SchemaPath, show
from runtime.grammar.json_schema.examples import examples
from runtime.grammar.json_schema.lower import lower
from runtime.grammar.json_schema.lowering import ANY_JSON_LADDER, LADDER, Lowered, Plan, Relaxation, Unspelled
from runtime.grammar.json_schema.texts.ecma import NO_CHARACTER
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

_DEFINITION = re.compile(r"json-schema:///#/\$defs/(\w+)")
_UNSATISFIABLE = "nsatisfiable"
"""In messages about schemas that no value matches."""
_DEAD = re.compile(r"nsatisfiable.* while processing json-schema:///#/\$defs/(\w+)")
_MAX_DEAD = 64
_SOURCE_LINE = re.compile(r" 1 \| ")
_MAX_LOOKS = 200
_MAPS = ("properties", "patternProperties", "$defs")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties")

Start = Callable[[str, Origin], Matcher]
"""The library's matcher at the start of a lowered schema. Raises BadConstraint."""


def compile_schema(
    document: SchemaDocument, layout: Mapping[str, Any], name: str, start: Start, closing: ClosingTokens
) -> Matcher:
    """A matcher for the schema. `layout`: see source.layout; `name`: of the backend. Raises BadConstraint or
    UnsupportedConstraint."""
    try:
        return _Compiler(document, layout, name, start).climb(LADDER, closing)
    except Unspelled:  # a text with characters that strings here do not contain
        escapes = {"json_allowed_escapes": ESCAPES + "u", "json_allow_general_unicode_escapes": True}
        return _Compiler(document, {**layout, **escapes}, name, start).climb(ANY_JSON_LADDER, closing)


class _Compiler:
    def __init__(self, document: SchemaDocument, layout: Mapping[str, Any], name: str, start: Start) -> None:
        self._document, self._layout, self._name, self._start_json = document, layout, name, start

    def climb(self, ladder: tuple[Relaxation, ...], closing: ClosingTokens) -> Matcher:
        refused: BadConstraint | None = None
        tried: list[Lowered] = []
        for relaxation in ladder[-1:] if self._document.scoped else ladder:
            plan = lower(self._document, relaxation)
            if plan.schema in tried:
                continue  # this step relaxes nothing
            tried.append(plan.schema)
            try:
                matcher = self._start(plan)
            except BadConstraint as error:
                message = _message(error, plan)
                if _UNSATISFIABLE in message:
                    raise self._nothing_matches(plan, relaxation, message) from None
                refused = refused or UnsupportedConstraint(message, where=KIND)
                continue
            if not plan.checks:
                return matcher
            checked = CheckedMatcher(matcher, JsonTracker(RuntimeChecks(plan).root), closing)
            checked.mask()
            return checked
        assert refused is not None, "a ladder has a step"
        raise refused

    def _start(self, plan: Plan) -> Matcher:
        """A matcher of the lowered schema. The library refuses the whole for one definition that nothing
        matches, so such definitions become `false` first."""
        origin = Origin(
            self._name, plan.listed(), tuple(plan.ignored), examples=partial(examples, plan.document)
        )
        dead = _endless(plan.schema)
        if "" in dead:
            raise BadConstraint("Unsatisfiable schema: it needs itself, so only infinite values would match")
        limit = len(dead) + _MAX_DEAD
        while True:
            schema = _without(plan.schema, dead) if dead else plan.schema
            text = json.dumps({**schema, "x-guidance": self._layout} if isinstance(schema, dict) else schema)
            try:
                return self._start_json(text, origin)
            except BadConstraint as error:
                named = _DEAD.search(error.message)
                if named is None or named[1] in dead or len(dead) >= limit:
                    raise
                dead.add(named[1])

    def _nothing_matches(self, plan: Plan, relaxation: Relaxation, message: str) -> BadConstraint:
        """The error for a schema that nothing matches, with the innermost path that explains it."""
        path: SchemaPath = ()
        seen = {path}
        while len(seen) < _MAX_LOOKS:
            for inner in _needed(self._document, path):
                if inner in seen:
                    continue
                seen.add(inner)
                cause = self._why_empty(inner, relaxation)
                if cause is not None:
                    path, message = inner, cause
                    break
            else:
                break
        # Of the texts with control characters, which this language leaves out, some may still match.
        unspelled = json.dumps(NO_CHARACTER)[1:-1] in json.dumps(plan.schema)
        kind = Unspelled if unspelled and not relaxation.everything else BadConstraint
        return kind(f"nothing matches: {message}", where=f"{KIND} {show(path)}")

    def _why_empty(self, path: SchemaPath, relaxation: Relaxation) -> str | None:
        """Why nothing matches the schema at `path`; None if something may."""
        try:
            plan = lower(self._document, relaxation, path)
        except BadConstraint as error:
            return error.message if "nothing matches" in error.message else None
        try:
            self._start(plan)
        except BadConstraint as error:
            message = _message(error, plan)
            return message if _UNSATISFIABLE in message else None
        return None


def _message(error: BadConstraint, plan: Plan) -> str:
    """The library's message about a lowered schema, in terms of the original one."""
    text = error.message.partition("failed to compile JSON schema: ")[2] or error.message
    text = _SOURCE_LINE.split(text)[0]
    text = _DEFINITION.sub(lambda name: show(plan.names.get(name[1], ())), text)
    return text.strip()[:400]


def _without(schema: Lowered, names: Collection[str]) -> Lowered:
    """A lowered schema with `false` for each reference to one of the definitions `names`."""
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.removeprefix("#/$defs/") in names:
        return False
    out: dict[str, Any] = dict(schema)
    for keyword in _MAPS:
        if keyword in out:
            out[keyword] = {
                name: _without(inner, names)
                for name, inner in out[keyword].items()
                if keyword != "$defs" or name not in names
            }
    for keyword in _LISTS:
        if keyword in out:
            out[keyword] = [_without(inner, names) for inner in out[keyword]]
    for keyword in _ONE:
        if keyword in out:
            out[keyword] = _without(out[keyword], names)
    return out


def _endless(schema: Lowered) -> set[str]:
    """The definitions of a lowered schema that only infinite values match, since they need themselves; ""
    stands for the schema as a whole."""
    if not isinstance(schema, dict) or not schema.get("$defs"):
        return set()
    parts: dict[str, Lowered] = {**schema["$defs"], "": {**schema, "$defs": {}}}
    open_ = {name for name, part in parts.items() if not _ends(part, parts.keys())}
    changed = bool(open_)
    while changed:
        ended = {name for name in open_ if _ends(parts[name], open_)}
        open_ -= ended
        changed = bool(ended)
    return open_


def _ends(schema: Lowered, open_: Collection[str]) -> bool:
    """Whether some value of `schema` needs none of the definitions `open_`; True if that is hard to tell."""
    if not isinstance(schema, dict):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.removeprefix("#/$defs/") in open_:
        return False
    if not all(_ends(inner, open_) for inner in schema.get("allOf", ())):
        return False
    for keyword in ("anyOf", "oneOf"):
        if schema.get(keyword) and not any(_ends(inner, open_) for inner in schema[keyword]):
            return False
    if schema.get("type") == "object":
        named = schema.get("properties", {})
        return all(_ends(named.get(name, True), open_) for name in schema.get("required", ()))
    if schema.get("type") == "array" and schema.get("minItems", 0) > 0 and not schema.get("prefixItems"):
        return _ends(schema.get("items", True), open_)
    return True


def _needed(document: SchemaDocument, path: SchemaPath) -> Iterator[SchemaPath]:
    """The schemas that some part of every value of the schema at `path` has to match."""
    node = document.node(path)
    if not isinstance(node, Mapping):
        return
    reference = node.get("$ref")
    if isinstance(reference, str):
        target = document.resolve(reference, document.base_at(path))
        if target is not None:
            yield target.path
        if document.alone(node):
            return
    for index, _ in enumerate(node.get("allOf", ())):
        yield (*path, "allOf", index)
    for name in node.get("required", ()) if node.get("type") == "object" else ():
        if name in node.get("properties", {}):
            yield (*path, "properties", name)
    if node.get("type") == "array" and node.get("minItems", 0) > 0 and isinstance(node.get("items"), Mapping):
        yield (*path, "items")
