"""A schema as one regular expression by outlines-core, if that keeps the schema exactly.

The library silently ignores some keywords (bounds of numbers, uniqueItems, a pattern beside a length) and
expands recursive references a few times; all of this is refused here by keyword and path. What the expression
does not offer is listed. Inside of an empty array or object white space may come twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from runtime.grammar.automata.regex_syntax import At, Chars, Node, nodes_of, parse
from runtime.grammar.json_schema.document import (
    KIND,
    WHITESPACE,
    Paths,
    SchemaDocument,
    SchemaPath,
    mistake,
    unsupported,
)
from runtime.grammar.json_schema.shapes import check_shapes, is_of
from runtime.grammar.json_schema.texts.ecma import spell
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

ORDER = "properties come in the order of the schema"
UNNAMED = "properties that an object with named ones does not name are not offered"
LEVELS = "arrays and objects of which nothing more is said nest two levels deep"

_SILENT = {
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
_KEYWORDS: dict[str, tuple[set[str], ...]] = {
    "string": ({"minLength", "maxLength"}, {"pattern"}),
    "array": ({"items", "minItems", "maxItems"},),
    "object": ({"properties", "required", "additionalProperties"},),
}
"""Type -> the sets of keywords that are kept together, beside it."""
MAX_NODES, MAX_DEPTH = 5000, 100
_EXACT = 2**53
_ESCAPED = ((0, 31), (34, 34), (92, 92), (127, 159))


def schema_regex(document: SchemaDocument, whitespace: str) -> tuple[str, tuple[str, ...]]:
    """(the expression of the documents of a schema, what it does not offer of them). Raises
    UnsupportedConstraint, BadConstraint."""
    try:
        from outlines_core.json_schema import build_regex_from_schema
    except ModuleNotFoundError:
        text = "needs the package 'outlines_core': pip install 'sglang-dsl[outlines]'"
        raise UnsupportedConstraint(text, where=KIND, hint='or grammar backend "auto"') from None
    reader = _Reader(document)
    schema = reader.read((), document.root, ())
    spaces = WHITESPACE[whitespace]
    try:
        pattern: str = build_regex_from_schema(json.dumps(schema), f"{spaces}?" if spaces else "")
    except ValueError as error:
        raise UnsupportedConstraint(f"outlines-core: {str(error)[:300]}", where=KIND) from None
    return pattern, tuple(dict.fromkeys(reader.narrowed))


class _Reader:
    """A schema in the keywords that outlines-core keeps, with its references written out."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self.narrowed: list[str] = []
        self._nodes = 0

    def read(self, path: SchemaPath, node: Any, through: Paths) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or len(through) > MAX_DEPTH:
            raise BadConstraint("is too large with its references written out", where=KIND, hint="split it")
        if not isinstance(node, Mapping):
            raise _unkept("a schema that is true or false", path)
        check_shapes(path, node, self._document.draft)
        keywords = {word: value for word, value in node.items() if word not in _SILENT}
        match keywords:
            case {"$ref": str(reference), **rest}:
                _alone("$ref", rest, path)
                target = self._document.resolve(reference, path)
                if target is None:
                    raise _unkept(f"$ref {reference!r}, which leads out of the schema,", path)
                if target.path in through:
                    raise _unkept(f"$ref {reference!r}, which leads back to itself,", path)
                return self.read(target.path, target.node, (*through, target.path))
            case {"anyOf": list(options), **rest}:
                _alone("anyOf", rest, path)
                return {"anyOf": [self.read((*path, "anyOf", at), option, through)
                                  for at, option in enumerate(options)]}  # fmt: skip
            case {"enum": values, **rest} | {"const": values, **rest}:
                return self._values("enum" if "enum" in keywords else "const", values, rest, path)
            case {"type": str(name), **rest}:
                return self._typed(name, rest, path, through)
            case {"type": list(names), **rest}:
                _alone("type", rest, path)
                return {"anyOf": [self._typed(name, {}, path, through) for name in names]}
            case _:
                raise _unkept(", ".join(keywords) or "a schema without a type", path)

    def _values(self, word: str, values: Any, rest: Mapping[str, Any], path: SchemaPath) -> Any:
        names = rest.get("type")
        listed = values if word == "enum" else [values]
        if rest.keys() - {"type"} or not all(is_of(value, names) for value in listed):
            raise _unkept(f"{word} beside {', '.join(rest)}", path)
        if not listed:
            raise mistake("enum is empty: nothing matches", path)
        if any(map(_is_beyond, listed)):
            raise _unkept(f"{word} with a number beyond 2**53", path)
        return {word: values}

    def _typed(self, name: str, rest: Mapping[str, Any], path: SchemaPath, through: Paths) -> Any:
        if rest and not any(rest.keys() <= keywords for keywords in _KEYWORDS.get(name, ())):
            kept = set().union(*_KEYWORDS.get(name, ()))
            others = ", ".join(sorted(rest.keys() - kept) or sorted(rest))
            raise _unkept(f"{others} beside type {name!r}", path)
        match name:
            case "string" if "pattern" in rest:
                return {"type": name, "pattern": f"^{_inside(rest['pattern'], path)}$"}
            case "array" if "items" in rest:
                return {"type": name, **rest, "items": self.read((*path, "items"), rest["items"], through)}
            case "object":
                return self._object(rest, path, through)
            case "array":
                self.narrowed.append(LEVELS)
        return {"type": name, **rest}

    def _object(self, rest: Mapping[str, Any], path: SchemaPath, through: Paths) -> Any:
        named, others = rest.get("properties", {}), rest.get("additionalProperties", True)
        if not named and others is not False:
            if rest.get("required"):
                raise _unkept("required without properties", path)
            if others is True:
                self.narrowed.append(LEVELS)
                return {"type": "object"}
            inner = self.read((*path, "additionalProperties"), others, through)
            return {"type": "object", "additionalProperties": inner}
        for odd in (name for name in named if json.dumps(name, ensure_ascii=False) != f'"{name}"'):
            raise _unkept(f"the name {odd!r}, which JSON escapes,", path)
        for missing in (name for name in rest.get("required", ()) if name not in named):
            raise _unkept(f"required {missing!r} without a schema under properties", path)
        self.narrowed += [ORDER] if len(named) > 1 else []
        self.narrowed += [UNNAMED] if others is not False else []
        inner = {name: self.read((*path, "properties", name), one, through) for name, one in named.items()}
        return {"type": "object", "properties": inner, "required": list(rest.get("required", ())),
                "additionalProperties": False}  # fmt: skip


def _inside(pattern: str, path: SchemaPath) -> str:
    """A pattern without its two anchors, in Python's spelling."""
    python = spell(pattern).python
    inner = python.removeprefix("^").removesuffix(r"\Z")
    if len(inner) != len(python) - 3 or any(map(_is_unkept, nodes_of(parse(inner, anchored=False)))):
        raise _unkept("a pattern that is not anchored at both ends, or takes what JSON escapes,", path)
    return f"(?:{inner})"


def _is_unkept(node: Node) -> bool:
    match node:
        case At():
            return True
        case Chars(ranges):
            return any(first <= high and low <= last for first, last in ranges for low, high in _ESCAPED)
        case _:
            return False


def _is_beyond(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) > _EXACT


def _alone(word: str, rest: Mapping[str, Any], path: SchemaPath) -> None:
    if rest:
        raise _unkept(f"{', '.join(rest)} beside {word}", path)


def _unkept(what: str, path: SchemaPath) -> UnsupportedConstraint:
    text = f"{what} is not kept by a regular expression"
    return unsupported(text, path, 'grammar backend "auto" keeps it')
