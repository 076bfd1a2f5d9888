"""Reading a schema's text, and what JSON may look like between its tokens. Knows no keyword."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

from runtime.grammar.json_schema.refs import KIND, SchemaDocument, show
from runtime.protocol.constraint import Constraint, SchemaFormat
from runtime.protocol.errors import BadConstraint, BadRequest, UnsupportedConstraint

ANY_JSON = "$$ANY$$"
"""The schema of any JSON value, as requests for a plain JSON object spell it."""

WHITESPACE = {
    "compact": None,
    "single": r"[ ]",
    "flexible": r"(?:[ ]|\r?\n[ \t]{0,40})",
}
"""Policy -> what may stand, at most once, wherever JSON allows whitespace; None = nothing. All are
bounded."""

ESCAPES = 'nrbtf\\"'
"""One spelling for each character: with `\\u0061` beside `a` a name would get past the schema that holds for
it."""

_MAX_NESTING = 100


def layout(whitespace: str) -> dict[str, Any]:
    """A policy as what llguidance reads under "x-guidance". Raises BadRequest for an unknown name."""
    if whitespace not in WHITESPACE:
        raise BadRequest(f"must be one of {', '.join(WHITESPACE)}, got {whitespace!r}", where="whitespace")
    pattern = WHITESPACE[whitespace]
    form = {"whitespace_flexible": False} if pattern is None else {"whitespace_pattern": pattern}
    return {"coerce_one_of": False, "lenient": False, "json_allowed_escapes": ESCAPES, **form}


def format_policy(name: str) -> str:
    """`name`, if it says what `format` may do. Raises BadRequest."""
    known = get_args(SchemaFormat)
    if name not in known:
        raise BadRequest(f"must be one of {', '.join(known)}, got {name!r}", where="schema_format")
    return name


def read_document(constraint: Constraint, policy: str) -> SchemaDocument:
    """The schema of a constraint, with what `format` does in it: as the constraint says, else by `policy`.
    Raises BadConstraint."""
    asserts = (constraint.schema_format or policy) == "assertion"
    return SchemaDocument(read_schema(constraint.spec), formats=asserts)


def read_schema(spec: str) -> Any:
    """The schema in `spec`. Raises BadConstraint with the position of the mistake."""
    if spec == ANY_JSON:
        return True
    try:
        schema = json.loads(spec, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        text = f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        raise BadConstraint(text, where=KIND) from None
    except (RecursionError, ValueError) as error:
        told = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadConstraint(told, where=KIND) from None
    if not isinstance(schema, (dict, bool)):
        raise BadConstraint("a schema is a JSON object or a boolean", where=KIND)
    _check_nesting(schema)
    if _SURROGATE.search(spec):
        _check_text(schema, ())
    return schema


def _no_constant(name: str) -> Any:
    raise ValueError(f"holds {name}, which is not JSON")


def _check_nesting(schema: Any) -> None:
    """The engine's own reader of JSON has a bound that it does not tell with a place."""
    level = [schema]
    for _ in range(_MAX_NESTING):
        level = [
            inner
            for node in level
            if isinstance(node, (dict, list))
            for inner in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return
    raise BadConstraint(
        f"is nested more than {_MAX_NESTING} levels deep", where=KIND, hint="use $defs and $ref"
    )


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]|[\ud800-\udfff]")
_SAID = {"$comment", "default", "description", "examples", "title"}


def _check_text(node: Any, place: tuple[str | int, ...]) -> None:
    """No text has a lone surrogate, though JSON can spell one: neither can a value here."""
    if isinstance(node, str) and any("\ud800" <= char <= "\udfff" for char in node):
        text = "holds a lone surrogate, which no text has"
        raise UnsupportedConstraint(text, where=f"{KIND} {show(place)}")
    if isinstance(node, list):
        for number, inner in enumerate(node):
            _check_text(inner, (*place, number))
    elif isinstance(node, dict):
        for name, inner in node.items():
            _check_text(name, place)
            if name not in _SAID:
                _check_text(inner, (*place, name))
