"""Which JSON schemas the xgrammar library keeps exactly, and what compiling them would cost it.

The library leaves out keywords it does not know without a word, so a schema is taken only if every keyword
in it is on the list here, in a combination that was tried; the rest is refused by name and place. What is
taken is never widened, but some spellings of valid documents are not offered: properties in another order
than the schema's, properties that the schema does not name where it names some, integers such as 1.0 and 1e2,
and escapes in strings of bounded length. It compiles nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from runtime.grammar.json_schema.refs import KIND, Place, SchemaDocument, show
from runtime.grammar.json_schema.schema_regex import ORDER
from runtime.grammar.json_schema.shapes import check_shapes, known, shown
from runtime.grammar.json_schema.unknown_keywords import MAX_TOLD
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

_MAX_NODES = 1500
_SILENT = frozenset({
    "$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default", "examples",
    "deprecated", "readOnly", "writeOnly",
})  # fmt: skip
"""Keywords that assert nothing."""

_BY_TYPE: dict[str, frozenset[str]] = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength"}),
    "integer": frozenset({"minimum", "maximum"}),
    "number": frozenset(),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""What may stand beside a type."""

_LARGEST = 10**15
_CHARACTERS = 2
"""States that one character of a bounded string takes, about."""


class Kept(NamedTuple):
    """What keeping a schema comes to. work: states that its counts are written out to. narrowed: what it
    allows and the library does not offer."""

    work: int
    narrowed: tuple[str, ...]


def check(document: SchemaDocument) -> Kept:
    """For the schema in `document`. Raises UnsupportedConstraint (keyword, place) or BadConstraint."""
    cost = 0
    met: dict[Place, tuple[Any, list[Place]]] = {}
    ahead: list[tuple[Place, Any]] = [((), document.root)]
    while ahead:
        place, node = ahead.pop()
        if place in met or node is True:
            continue
        if len(met) >= _MAX_NODES:
            # Long chains of choices take the library a time that grows with a power of their length.
            raise UnsupportedConstraint(
                f"has more than {_MAX_NODES} subschemas", where=KIND, hint='grammar backend "auto" takes more'
            )
        if node is False:
            raise _refused("the schema false", place)
        if not isinstance(node, Mapping):
            raise BadConstraint(f"a schema is an object or a boolean, not {shown(node)}", where=KIND)
        check_shapes(place, node, document.draft)
        cost += _cost(node)
        parts = list(_parts(document, place, node))
        met[place] = node, [inner for inner, schema in parts if schema is not True]
        ahead.extend(parts)
    _check_ends(met)
    told = dict.fromkeys(line for place, (node, _) in met.items() for line in _left_out(place, node))
    return Kept(cost, tuple(told)[:MAX_TOLD])


def _left_out(place: Place, node: Mapping[str, Any]) -> Iterator[str]:
    named = node.get("properties", {})
    if len(named) > 1:
        yield ORDER
    if named and "additionalProperties" not in node:
        yield f"properties that it does not name at {show(place)}"
    if "minLength" in node or "maxLength" in node:
        yield f"quotes, backslashes and control characters in strings at {show(place)}"


def _check_ends(met: Mapping[Place, tuple[Any, list[Place]]]) -> None:
    """Every schema has a value that comes to an end: the library would lead into one that has none, and leave
    the text there."""
    ending: set[Place] = set()
    grows = True
    while grows:
        new = [place for place in met if place not in ending and _ends(*met[place], place, ending)]
        grows = bool(new)
        ending.update(new)
    for place in met:
        if place not in ending:
            raise UnsupportedConstraint(
                "no finite value matches it, and xgrammar would begin one",
                where=f"{KIND} {show(place)}",
                hint='take it out, or use grammar backend "auto"',
            )


def _ends(node: Mapping[str, Any], parts: list[Place], place: Place, ending: set[Place]) -> bool:
    """Whether a schema has a value whose parts are all of schemas that have one."""
    if "anyOf" in node:
        return len(parts) < len(node["anyOf"]) or any(part in ending for part in parts)
    if "items" in node and not node.get("minItems", 0):
        return True
    if "properties" in node:
        needed = {(*place, "properties", name) for name in node.get("required", ())}
        return all(part in ending for part in parts if part in needed)
    return all(part in ending for part in parts)


def _parts(document: SchemaDocument, place: Place, node: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """The schemas that `node` is made of, after a look at its own keywords."""
    words = [word for word in node if word not in _SILENT]
    for word in words:
        if not known(word, document.draft):
            raise _refused(f"{word}, which means nothing in this draft,", place)
    for word in ("$ref", "anyOf", "enum", "const"):
        if word in words:
            for other in words:
                if other != word:
                    raise _refused(f"{other} beside {word}", place)
            yield from _ALONE[word](document, place, node)
            return
    kind = node.get("type")
    if isinstance(kind, list) and words == ["type"]:
        return
    if not isinstance(kind, str):
        if words:
            raise _refused(f"{words[0]} without one type", place)
        return
    for word in words:
        if word != "type" and word not in _BY_TYPE[kind]:
            raise _refused(f"{word} beside type {kind}", place)
    for word in ("minimum", "maximum"):
        if word in node and not (float(node[word]).is_integer() and abs(node[word]) < _LARGEST):
            raise _refused(f"{word} {shown(node[word])}, not a whole number of up to 15 digits,", place)
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minimum", "maximum")):
        if node.get(low, 0) > node.get(high, math.inf) and low in node:
            text = f"{low} {node[low]} is above {high} {node[high]}: no value matches"
            raise UnsupportedConstraint(text, where=f"{KIND} {show(place)}")
    yield from _inside(place, node)


def _inside(place: Place, node: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    properties = node.get("properties", {})
    for name, inner in properties.items():
        yield (*place, "properties", name), inner
    for name in node.get("required", ()):
        if name not in properties:
            raise _refused(f"required {name!r}, which is not in properties,", place)
    rest = node.get("additionalProperties", False)
    if rest is not False and (properties or rest is not True):
        raise _refused("additionalProperties other than false", place)
    if "items" in node:
        if not isinstance(node["items"], (Mapping, bool)):
            raise _refused("items as a list", place)
        yield (*place, "items"), node["items"]


def _reference(
    document: SchemaDocument, place: Place, node: Mapping[str, Any]
) -> Iterator[tuple[Place, Any]]:
    reference = node["$ref"]
    found = document.resolve(reference, document.base_at(place))
    if found is None or not reference.startswith("#") or any(mark in reference for mark in "~%"):
        raise _refused(f"$ref {reference!r}", place)
    yield found.place, found.node


def _options(document: SchemaDocument, place: Place, node: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    for number, inner in enumerate(node["anyOf"]):
        yield (*place, "anyOf", number), inner


def _values(document: SchemaDocument, place: Place, node: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    values = node["enum"] if "enum" in node else [node["const"]]
    for value in values:
        if not isinstance(value, (str, bool)) and value is not None and type(value) is not int:
            raise _refused(f"the value {shown(value)}, neither text, integer, boolean nor null,", place)
        if type(value) is int and abs(value) >= _LARGEST:
            raise _refused(f"the value {shown(value)}, of more than 15 digits,", place)
    return iter(())


_ALONE: dict[str, Callable[[SchemaDocument, Place, Mapping[str, Any]], Iterator[tuple[Place, Any]]]] = {
    "$ref": _reference, "anyOf": _options, "enum": _values, "const": _values,
}  # fmt: skip


def spelled_out(node: Any) -> Any:
    """The schema for the library, whose own reading of what is left out differs from the standard's: objects
    and arrays that say nothing of their members take any."""
    match node:
        case {"type": "object"} if not any(word in node for word in ("properties", "additionalProperties")):
            node = {**node, "additionalProperties": True}
        case {"type": "array"} if "items" not in node:
            node = {**node, "items": {}}
        case {"type": "string"} if "minLength" in node or "maxLength" in node:
            return _bounded(int(node.get("minLength", 0)), node.get("maxLength"))
    match node:
        case dict():
            return {
                word: _spelled_map(value) if word in _MAPS else
                [spelled_out(item) for item in value] if word == "anyOf" else
                spelled_out(value) if word == "items" else value
                for word, value in node.items()
            }  # fmt: skip
        case _:
            return node


_CHARACTER = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"


def _bounded(low: int, high: float | None) -> dict[str, Any]:
    """A string of so many characters: the library's own counts let control characters into it."""
    if high == 0 and low == 0:
        return {"const": ""}
    return {"type": "string", "pattern": f"^{_CHARACTER}{{{low},{'' if high is None else int(high)}}}$"}


_MAPS = ("properties", "$defs", "definitions")


def _spelled_map(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: spelled_out(inner) for name, inner in value.items()}


def _cost(node: Mapping[str, Any]) -> int:
    counts = max(int(node.get("maxLength", 0)), int(node.get("minLength", 0)))
    items = max(int(node.get("maxItems", 0)), int(node.get("minItems", 0)))
    return _CHARACTERS * counts + items


def _refused(what: str, place: Place) -> UnsupportedConstraint:
    return UnsupportedConstraint(
        f"{what} is not kept exactly by xgrammar",
        where=f"{KIND} {show(place)}",
        hint='grammar backend "auto" chooses one that keeps it',
    )
