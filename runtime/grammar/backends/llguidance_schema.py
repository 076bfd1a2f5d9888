"""JSON schemas by llguidance: the narrowest language that the library takes, and checks for what it lacks.

A schema is lowered to what the library keeps exactly. If it refuses that, more is left to the validator, step
by step, down to JSON of the right type. Of a schema that nothing matches the innermost cause is reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from runtime.grammar.automata.regex_syntax import NOTHING
from runtime.grammar.base import Matcher, Origin
from runtime.grammar.json_schema.checks.checked import CheckedMatcher, ClosingTokens
from runtime.grammar.json_schema.checks.runtime_checks import RuntimeChecks
from runtime.grammar.json_schema.checks.tracker import JsonTracker
from runtime.grammar.json_schema.document import ESCAPES, KIND, SchemaDocument, SchemaPath, show
from runtime.grammar.json_schema.examples import examples
from runtime.grammar.json_schema.lower import lower
from runtime.grammar.json_schema.lowering import ANY_JSON_LADDER, LADDER, Lowered, Plan, Relaxation, Unspelled
from runtime.grammar.json_schema.shapes import endless
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

_DEFINITION = re.compile(r"json-schema:///#/\$defs/(\w+)")
_EMPTY = re.compile("nsatisfiable|nothing matches")
"""In messages about schemas that no value matches."""
_DEAD = re.compile(r"nsatisfiable.* while processing json-schema:///#/\$defs/(\w+)")
_MAX_DEAD = 64
_SOURCE_LINE = re.compile(r" 1 \| ")
_MAX_LOOKS = 200

Start = Callable[[str, Origin], Matcher]
"""The library's matcher at the start of a lowered schema. Raises BadConstraint."""


def compile_schema(
    document: SchemaDocument, layout: Mapping[str, Any], name: str, start: Start, closing: ClosingTokens
) -> Matcher:
    """A matcher for the schema. `name`: of the backend. Raises BadConstraint or UnsupportedConstraint."""
    try:
        return _Compiler(document, layout, name, start).climb(LADDER, closing)
    except Unspelled:  # a text with characters that strings here do not contain
        escapes = {"json_allowed_escapes": ESCAPES + "u", "json_allow_general_unicode_escapes": True}
        return _Compiler(document, {**layout, **escapes}, name, start).climb(ANY_JSON_LADDER, closing)


class _Compiler:
    def __init__(self, document: SchemaDocument, layout: Mapping[str, Any], name: str, start: Start) -> None:
        self._document, self._layout, self._name, self._start_json = document, layout, name, start
        self._dead = endless(document)

    def climb(self, ladder: tuple[Relaxation, ...], closing: ClosingTokens) -> Matcher:
        refused: BadConstraint | None = None
        tried: list[Lowered] = []
        for relaxation in ladder[-1:] if self._document.scoped else ladder:
            plan = lower(self._document, relaxation)
            if plan.schema in tried:
                continue  # this step relaxes nothing
            tried.append(plan.schema)
            try:
                plan, matcher = self._start(plan, relaxation)
            except BadConstraint as error:
                if _EMPTY.search(error.message):
                    raise self._nothing_matches(plan, relaxation, error.message) from None
                refused = refused or UnsupportedConstraint(error.message, where=KIND)
                continue
            if not plan.checks:
                return matcher
            checked = CheckedMatcher(matcher, JsonTracker(RuntimeChecks(plan).root), closing)
            checked.mask()
            return checked
        assert refused is not None, "a ladder has a step"
        raise refused

    def _start(self, plan: Plan, relaxation: Relaxation, path: SchemaPath = ()) -> tuple[Plan, Matcher]:
        """A matcher of the schema at `path`, lowered to `plan`. The library refuses the whole for one
        definition that nothing matches, so such definitions become `false` first, in another plan."""
        if path in self._dead:
            raise BadConstraint("Unsatisfiable schema: it needs itself, so only infinite values would match")
        dead = set(self._dead)
        while True:
            try:
                if dead:
                    plan = lower(self._document, relaxation, path, dead)
                origin = Origin(
                    self._name, plan.listed(), tuple(plan.ignored), examples=partial(examples, plan.document)
                )
                text = json.dumps({**plan.schema, "x-guidance": self._layout})
                return plan, self._start_json(text, origin)
            except BadConstraint as error:
                named = _DEAD.search(error.message)
                empty = plan.names.get(named[1]) if named is not None else None
                if empty is None or empty in dead or len(dead) >= len(self._dead) + _MAX_DEAD:
                    raise BadConstraint(_message(error, plan)) from None
                dead.add(empty)

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
        unspelled = json.dumps(NOTHING)[1:-1] in json.dumps(plan.schema)
        kind = Unspelled if unspelled and not relaxation.everything else BadConstraint
        return kind(f"nothing matches: {message}", where=f"{KIND} {show(path)}")

    def _why_empty(self, path: SchemaPath, relaxation: Relaxation) -> str | None:
        """Why nothing matches the schema at `path`; None if something may."""
        try:
            self._start(lower(self._document, relaxation, path), relaxation, path)
        except BadConstraint as error:
            return error.message if _EMPTY.search(error.message) else None
        return None


def _message(error: BadConstraint, plan: Plan) -> str:
    """The library's message about a lowered schema, in terms of the original one."""
    text = error.message.partition("failed to compile JSON schema: ")[2] or error.message
    text = _SOURCE_LINE.split(text)[0]
    text = _DEFINITION.sub(lambda name: show(plan.names.get(name[1], ())), text)
    return text.strip()[:400]


def _needed(document: SchemaDocument, path: SchemaPath) -> Iterator[SchemaPath]:
    """The schemas that some part of every value of the schema at `path` has to match."""
    node = document.node(path)
    if not isinstance(node, Mapping):
        return
    yield from (target.path for target in document.targets[path].values())
    if document.alone(node):
        return
    for index, _ in enumerate(node.get("allOf", ())):
        yield (*path, "allOf", index)
    for name in node.get("required", ()) if node.get("type") == "object" else ():
        if name in node.get("properties", {}):
            yield (*path, "properties", name)
    if node.get("type") == "array" and node.get("minItems", 0) > 0 and isinstance(node.get("items"), Mapping):
        yield (*path, "items")
