"""Schemas that nothing matches: leaving them out of a lowered schema, and finding where one is.

It compiles nothing; what is empty it is told.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from runtime.grammar.json_schema.refs import Place, SchemaDocument
from runtime.grammar.json_schema.relaxation import Lowered
from runtime.protocol.errors import BadConstraint

_MAX_LOOKS = 200
_MAPS = ("properties", "patternProperties", "$defs")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_ONE = ("items", "additionalProperties")


def bury(schema: Lowered, names: Collection[str]) -> Lowered:
    """A lowered schema with `false` for each reference to one of the definitions `names`."""
    if not isinstance(schema, dict):
        return schema
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.removeprefix("#/$defs/") in names:
        return False
    out: dict[str, Any] = dict(schema)
    for word in _MAPS:
        if word in out:
            out[word] = {
                name: bury(inner, names)
                for name, inner in out[word].items()
                if word != "$defs" or name not in names
            }
    for word in _LISTS:
        if word in out:
            out[word] = [bury(inner, names) for inner in out[word]]
    for word in _ONE:
        if word in out:
            out[word] = bury(out[word], names)
    return out


def endless(schema: Lowered) -> set[str]:
    """The definitions of a lowered schema that only infinite values match, since they need themselves. ""
    among them stands for the schema as a whole."""
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
    """Whether some value of `schema` needs none of the definitions `open_`; True where it is hard to say."""
    if not isinstance(schema, dict):
        return True
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.removeprefix("#/$defs/") in open_:
        return False
    if not all(_ends(inner, open_) for inner in schema.get("allOf", ())):
        return False
    for word in ("anyOf", "oneOf"):
        if schema.get(word) and not any(_ends(inner, open_) for inner in schema[word]):
            return False
    if schema.get("type") == "object":
        named = schema.get("properties", {})
        return all(_ends(named.get(name, True), open_) for name in schema.get("required", ()))
    if schema.get("type") == "array" and schema.get("minItems", 0) > 0 and not schema.get("prefixItems"):
        return _ends(schema.get("items", True), open_)
    return True


def innermost(document: SchemaDocument, empty: Callable[[Place], str | None], told: str) -> tuple[Place, str]:
    """The innermost schema on whose account nothing matches the root, and why. `empty` says why nothing
    matches the schema at a place, None where something does."""
    place: Place = ()
    met = {place}
    while len(met) < _MAX_LOOKS:
        for inner in _needed(document, place):
            if inner in met:
                continue
            met.add(inner)
            try:
                why = empty(inner)
            except BadConstraint as error:
                why = error.message if "nothing matches" in error.message else None
            if why is not None:
                place, told = inner, why
                break
        else:
            break
    return place, told


def _needed(document: SchemaDocument, place: Place) -> Iterator[Place]:
    """The schemas that some part of every value of the schema at `place` has to match."""
    node: Any = document.root
    for step in place:
        node = node[step]
    if not isinstance(node, Mapping):
        return
    reference = node.get("$ref")
    if isinstance(reference, str):
        target = document.resolve(reference, document.base_at(place))
        if target is not None:
            yield target.place
        if document.alone(node):
            return
    for index, _ in enumerate(node.get("allOf", ())):
        yield (*place, "allOf", index)
    for name in node.get("required", ()) if node.get("type") == "object" else ():
        if name in node.get("properties", {}):
            yield (*place, "properties", name)
    if node.get("type") == "array" and node.get("minItems", 0) > 0 and isinstance(node.get("items"), Mapping):
        yield (*place, "items")
