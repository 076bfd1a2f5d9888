"""Which JSON schemas the xgrammar library is given: all but those that it was measured to get wrong.

Release 0.2.8 compiled 830 schemas of one to three keywords, and 500 drawn ones, as they are; jsonschema
judged random outputs and documents near to valid ones. The library leaves out some keywords without a word,
alone or beside others. These are refused by name and place. Of 2,356 other drawn schemas that are taken, with
28,000 documents, none was widened; a vocabulary of single bytes can spell lone surrogates in strings, though.
`Kept.narrowed` tells which valid documents are not offered. Compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from runtime.grammar.automata.charset import SURROGATES, Ranges, difference
from runtime.grammar.automata.regex_syntax import Chars, nodes_of, parse, without_conditions
from runtime.grammar.ebnf import tree
from runtime.grammar.json_schema.refs import KIND, Place, SchemaDocument, show
from runtime.grammar.json_schema.schema_regex import ORDER, is_of
from runtime.grammar.json_schema.shapes import KEYWORDS, check_shapes, known, shown
from runtime.grammar.json_schema.texts.ecma import spell
from runtime.grammar.json_schema.texts.formats import CHECKED, FORMATS
from runtime.grammar.json_schema.unknown_keywords import MAX_TOLD, unknown_keywords
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

UNKEPT = frozenset({
    "$dynamicRef", "$recursiveRef", "additionalItems", "allOf", "contains", "dependencies",
    "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "minProperties",
    "multipleOf", "not", "oneOf", "patternProperties", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems",
})  # fmt: skip
"""Keywords that it leaves out, or keeps only in some places."""

_ALONE = ("$ref", "anyOf", "enum", "const")
"""Beside one of these it leaves out all others, such as `type`."""
_STRINGS = ("pattern", "format", "minLength", "maxLength")
"""Of these it keeps one, or both lengths."""
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TYPED = frozenset({*_STRINGS, *_NUMBERS, "maxItems", "maxProperties", "minItems", "required"})
"""Left out where the schema has no type: it takes one from `properties`, `items` and the like."""
_FORMATS = frozenset({"duration", "email", "hostname", "uri", "uri-reference", "uuid"})
"""Those it keeps. For others it takes the 31st of November, 01.2.3.4, or anything."""
_ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), *SURROGATES)
"""Characters that JSON escapes. Where a pattern leaves no other choice, the library does not escape them."""
_LARGEST = 10**15
"""It rounds larger numbers."""
_MAX_NODES = 1500
_CHARACTERS = 2
"""States that one character of a bounded string takes, about."""


class Kept(NamedTuple):
    """What keeping a schema comes to. work: states that its counts are written out to. narrowed: what it
    allows and the library does not offer. ignored: what has no effect."""

    work: int
    narrowed: tuple[str, ...]
    ignored: tuple[str, ...]


def check(document: SchemaDocument) -> Kept:
    """Read the schema in `document`. An array without `items` gets them: the library would leave it empty.
    Raises UnsupportedConstraint (keyword, place) or BadConstraint."""
    work = 0
    narrowed: dict[str, None] = {}
    ignored = dict.fromkeys(document.told)
    met: dict[Place, tuple[Mapping[str, Any], list[Place]]] = {}
    ahead: list[tuple[Place, Any]] = [((), document.root)]
    while ahead:
        place, node = ahead.pop()
        if place in met or not isinstance(node, dict):
            continue
        if len(met) >= _MAX_NODES:
            # Long chains of choices take the library a time that grows with a power of their length.
            raise UnsupportedConstraint(
                f"has more than {_MAX_NODES} subschemas", where=KIND, hint='grammar backend "auto" takes more'
            )
        check_shapes(place, node, document.draft)
        for reason in _unkept(node, document.draft):
            raise _refused(reason, place)
        if "array" in _types(node) and "prefixItems" not in node:
            node.setdefault("items", True)
        parts = list(_parts(document, place, node))
        met[place] = node, [inner for inner, schema in parts if schema is not True]
        ahead.extend(parts)
        work += _work(place, node)
        narrowed |= dict.fromkeys(_left_out(place, node))
        ignored |= dict.fromkeys(unknown_keywords(place, node, document.draft))
        if not _is_known_format(node):
            ignored[f"format {node['format']!r} at {show(place)}"] = None
    _check_ends(met)
    return Kept(work, tuple(narrowed)[:MAX_TOLD], tuple(ignored)[:MAX_TOLD])


def _refused(what: str, place: Place) -> UnsupportedConstraint:
    return UnsupportedConstraint(
        f"{what} is not kept exactly by xgrammar",
        where=f"{KIND} {show(place)}",
        hint='grammar backend "auto" chooses one that keeps it',
    )


def _types(node: Mapping[str, Any]) -> list[str]:
    types = node.get("type", [])
    return [types] if isinstance(types, str) else list(types)


def _is_known_format(node: Mapping[str, Any]) -> bool:
    return "format" not in node or node["format"] in FORMATS or node["format"] in CHECKED


def _unkept(node: Mapping[str, Any], draft: int) -> Iterator[str]:
    """What of one schema object the library does not keep."""
    words = [word for word in node if word in KEYWORDS or word in UNKEPT or word in _ALONE]
    for word in words:
        if word in UNKEPT:
            yield word
        elif not known(word, draft):
            yield f"{word}, which means nothing in this draft,"
        elif word in _TYPED and not {"type", "properties", "items"} & node.keys():
            yield f"{word} without a type"
    for word in (word for word in _ALONE if word in node):
        beside = {word, "type"} if word in ("enum", "const") else {word}
        yield from (f"{other} beside {word}" for other in words if other not in beside)
    yield from _unkept_values(node)
    properties = node.get("properties", {})
    for name in node.get("required", ()):
        if name not in properties:
            yield f"required {name!r}, which is not in properties,"
    if properties and node.get("additionalProperties", False) is not False:
        yield "additionalProperties other than false"  # it does not tell "\u0061" from "a" there
    if isinstance(node.get("items"), list):
        yield "items as a list"
    for word in _NUMBERS:
        if isinstance(node.get(word, 0), bool) or abs(node.get(word, 0)) >= _LARGEST:
            yield f"{word} {shown(node[word])}"
    strings = [word for word in _STRINGS if word in node]
    if len(strings) > 1 and strings[0] in ("pattern", "format"):
        yield f"{strings[1]} beside {strings[0]}"
    if "format" in node and _is_known_format(node) and node["format"] not in _FORMATS:
        yield f"format {node['format']!r}"


def _unkept_values(node: Mapping[str, Any]) -> Iterator[str]:
    listed = [*node.get("enum", ()), *([node["const"]] if "const" in node else ())]
    for value in listed:
        if not is_of(value, node.get("type")):
            yield f"the value {shown(value)}, which is not of its type,"
    while listed:
        value = listed.pop()
        if type(value) is int and abs(value) >= _LARGEST:
            yield f"the value {shown(value)}, of more than 15 digits,"
        inner = value.values() if isinstance(value, Mapping) else value
        listed.extend(inner if isinstance(value, Mapping | list) else ())


def _work(place: Place, node: Mapping[str, Any]) -> int:
    """States that the counts of one schema are written out to. Raises UnsupportedConstraint or BadConstraint
    for its pattern."""
    text, items = (
        max(int(node.get(f"min{of}", 0)), int(node.get(f"max{of}", 0))) for of in ("Length", "Items")
    )
    return _CHARACTERS * text + items + (_states(node["pattern"], place) if "pattern" in node else 0)


def _states(pattern: str, place: Place) -> int:
    try:
        root = without_conditions(parse(spell(pattern).python))
    except UnsupportedConstraint as error:
        raise _refused(f"pattern {shown(pattern)} ({error.message})", place) from None
    except BadConstraint as error:
        raise BadConstraint(error.message, where=f"{KIND} {show((*place, 'pattern'))}") from None
    classes = (node.ranges for node in nodes_of(root) if isinstance(node, Chars))
    if "[^]" in pattern or any(not difference(ranges, _ESCAPED) for ranges in classes):
        raise _refused(f"pattern {shown(pattern)}, of a character that JSON escapes,", place)
    return tree.counted(tree.Grammar({"root": root}))


def _left_out(place: Place, node: Mapping[str, Any]) -> Iterator[str]:
    """What a schema object allows and the library does not offer."""
    properties = node.get("properties", {})
    if "type" not in node and {"properties", "items", "prefixItems", "additionalProperties"} & node.keys():
        yield f"values of other types at {show(place)}"
    if len(properties) > 1:
        yield ORDER
    if (properties or "maxProperties" in node) and "additionalProperties" not in node:
        yield f"properties that it does not name at {show(place)}"
    if "prefixItems" in node and "items" not in node:
        yield f"items after the first {len(node['prefixItems'])} at {show(place)}"
    if "minLength" in node or "maxLength" in node:
        yield f"quotes, backslashes and control characters in strings at {show(place)}"
    if not (node.get("pattern", "^$").startswith("^") and node.get("pattern", "^$").endswith("$")):
        yield f"text around what the pattern finds at {show(place)}"


def _parts(document: SchemaDocument, place: Place, node: Mapping[str, Any]) -> Iterator[tuple[Place, Any]]:
    """The schemas that `node` is made of, with their places."""
    if "$ref" in node:
        reference = node["$ref"]
        found = document.resolve(reference, document.base_at(place))
        spelled_out = (reference == "#" or reference.startswith("#/")) and not set(reference) & set("~%")
        if found is None or not spelled_out:
            raise _refused(f"$ref {reference!r}", place)
        yield found.place, found.node
    for steps, inner in document.subschemas(node):
        if steps[0] not in ("$defs", "definitions"):
            yield (*place, *steps), inner


def _check_ends(met: Mapping[Place, tuple[Mapping[str, Any], list[Place]]]) -> None:
    """Every schema has a value that comes to an end: the library would lead into one that has none, and leave
    the text there, or not come back from compiling it."""
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
    if "$ref" in node:
        return all(part in ending for part in parts)
    needed = {(*place, "properties", name) for name in node.get("required", ())}
    needed |= {(*place, "items")} if node.get("minItems", 0) else set()
    return all(part in ending for part in parts if part in needed or "prefixItems" in part[len(place) :])
