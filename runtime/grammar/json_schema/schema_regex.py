"""A schema as one regular expression, made by outlines-core, where that expression keeps the schema exactly.

The library says nothing of what it does not read (bounds of numbers, uniqueItems, a pattern beside a length)
and expands references that lead back a few times; all of this is refused here, by keyword and place. What the
expression offers less than the schema allows is told. Where an array or object may be empty, white space may
stand twice. It knows no automaton.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from runtime.grammar.automata.regex_syntax import At, Chars, Node, nodes_of, parse
from runtime.grammar.json_schema.refs import KIND, Place, SchemaDocument, show
from runtime.grammar.json_schema.shapes import check_shapes
from runtime.grammar.json_schema.source import WHITESPACE
from runtime.grammar.json_schema.texts.ecma import spell
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

ORDER = "properties come in the order of the schema"
UNNAMED = "properties that an object with named ones does not name are not offered"
LEVELS = "arrays and objects of which nothing more is said nest two levels deep"

_SILENT = {
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly",
}  # fmt: skip
_WORDS: dict[str, tuple[set[str], ...]] = {
    "string": ({"minLength", "maxLength"}, {"pattern"}),
    "array": ({"items", "minItems", "maxItems"},),
    "object": ({"properties", "required", "additionalProperties"},),
}
"""Type -> the sets of keywords that are kept together, beside it."""
MAX_NODES, MAX_DEPTH = 5000, 100
_EXACT = 2**53
_ESCAPED = ((0, 31), (34, 34), (92, 92), (127, 159))


def schema_regex(document: SchemaDocument, whitespace: str) -> tuple[str, tuple[str, ...]]:
    """(the expression of the documents of a schema, what it offers less than the schema allows). Raises
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
        found: str = build_regex_from_schema(json.dumps(schema), f"{spaces}?" if spaces else "")
    except ValueError as error:
        raise UnsupportedConstraint(f"outlines-core: {str(error)[:300]}", where=KIND) from None
    return found, tuple(dict.fromkeys(reader.narrowed))


class _Reader:
    """A schema in the words that outlines-core keeps, its references written out."""

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self.narrowed: list[str] = []
        self._nodes = 0

    def read(self, place: Place, node: Any, through: tuple[Place, ...]) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES or len(through) > MAX_DEPTH:
            raise BadConstraint("is too large with its references written out", where=KIND, hint="split it")
        if not isinstance(node, Mapping):
            raise _unkept("a schema that is true or false", place)
        check_shapes(place, node, self._document.draft)
        words = {word: value for word, value in node.items() if word not in _SILENT}
        match words:
            case {"$ref": str(reference), **rest}:
                _alone("$ref", rest, place)
                target = self._document.resolve(reference, self._document.base_at(place))
                if target is None:
                    raise _unkept(f"$ref {reference!r}, which leads out of the schema,", place)
                if target.place in through:
                    raise _unkept(f"$ref {reference!r}, which leads back to itself,", place)
                return self.read(target.place, target.node, (*through, target.place))
            case {"anyOf": list(options), **rest}:
                _alone("anyOf", rest, place)
                return {"anyOf": [self.read((*place, "anyOf", at), option, through)
                                  for at, option in enumerate(options)]}  # fmt: skip
            case {"enum": values, **rest} | {"const": values, **rest}:
                return self._values("enum" if "enum" in words else "const", values, rest, place)
            case {"type": str(name), **rest}:
                return self._typed(name, rest, place, through)
            case {"type": list(names), **rest}:
                _alone("type", rest, place)
                return {"anyOf": [self._typed(name, {}, place, through) for name in names]}
            case _:
                raise _unkept(", ".join(words) or "a schema without a type", place)

    def _values(self, word: str, values: Any, rest: Mapping[str, Any], place: Place) -> Any:
        names = rest.get("type")
        listed = values if word == "enum" else [values]
        if rest.keys() - {"type"} or not all(is_of(value, names) for value in listed):
            raise _unkept(f"{word} beside {', '.join(rest)}", place)
        if not listed:
            raise BadConstraint("enum is empty: nothing matches", where=f"{KIND} {show(place)}")
        if any(map(_is_beyond, listed)):
            raise _unkept(f"{word} with a number beyond 2**53", place)
        return {word: values}

    def _typed(self, name: str, rest: Mapping[str, Any], place: Place, through: tuple[Place, ...]) -> Any:
        if rest and not any(rest.keys() <= words for words in _WORDS.get(name, ())):
            kept = set().union(*_WORDS.get(name, ()))
            told = ", ".join(sorted(rest.keys() - kept) or sorted(rest))
            raise _unkept(f"{told} beside type {name!r}", place)
        match name:
            case "string" if "pattern" in rest:
                return {"type": name, "pattern": f"^{_inside(rest['pattern'], place)}$"}
            case "array" if "items" in rest:
                return {"type": name, **rest, "items": self.read((*place, "items"), rest["items"], through)}
            case "object":
                return self._object(rest, place, through)
            case "array":
                self.narrowed.append(LEVELS)
        return {"type": name, **rest}

    def _object(self, rest: Mapping[str, Any], place: Place, through: tuple[Place, ...]) -> Any:
        named, others = rest.get("properties", {}), rest.get("additionalProperties", True)
        if not named and others is not False:
            if rest.get("required"):
                raise _unkept("required without properties", place)
            if others is True:
                self.narrowed.append(LEVELS)
                return {"type": "object"}
            inner = self.read((*place, "additionalProperties"), others, through)
            return {"type": "object", "additionalProperties": inner}
        for odd in (name for name in named if json.dumps(name, ensure_ascii=False) != f'"{name}"'):
            raise _unkept(f"the name {odd!r}, which JSON escapes,", place)
        for missing in (name for name in rest.get("required", ()) if name not in named):
            raise _unkept(f"required {missing!r} without a schema under properties", place)
        self.narrowed += [ORDER] if len(named) > 1 else []
        self.narrowed += [UNNAMED] if others is not False else []
        inner = {name: self.read((*place, "properties", name), one, through) for name, one in named.items()}
        return {"type": "object", "properties": inner, "required": list(rest.get("required", ())),
                "additionalProperties": False}  # fmt: skip


def _inside(pattern: str, place: Place) -> str:
    """What a pattern says between its two ends, in Python's spelling."""
    python = spell(pattern).python
    inner = python.removeprefix("^").removesuffix(r"\Z")
    if len(inner) != len(python) - 3 or any(map(_is_unkept, nodes_of(parse(inner, anchored=False)))):
        raise _unkept("a pattern that is not anchored at both ends, or takes what JSON escapes,", place)
    return f"(?:{inner})"


def _is_unkept(node: Node) -> bool:
    match node:
        case At():
            return True
        case Chars(ranges):
            return any(first <= high and low <= last for first, last in ranges for low, high in _ESCAPED)
        case _:
            return False


_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "array": (list,), "object": (dict,),
}  # fmt: skip


def is_of(value: Any, names: Any) -> bool:
    """Whether a value is of the type, or of one of the types, of these names; None: any."""
    if names is None:
        return True
    kinds = tuple(kind for name in ([names] if isinstance(names, str) else names) for kind in _KINDS[name])
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)


def _is_beyond(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) > _EXACT


def _alone(word: str, rest: Mapping[str, Any], place: Place) -> None:
    if rest:
        raise _unkept(f"{', '.join(rest)} beside {word}", place)


def _unkept(what: str, place: Place) -> UnsupportedConstraint:
    return UnsupportedConstraint(
        f"{what} is not kept by a regular expression", where=f"{KIND} {show(place)}",
        hint='grammar backend "auto" keeps it',
    )  # fmt: skip
