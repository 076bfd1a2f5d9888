"""Which JSON schemas go to the xgrammar library: all but those that it was measured to get wrong.

Release 0.2.8 silently ignores some keywords, alone or beside others (jsonschema judged the outputs of 1,330
schemas); these are refused by name and path. Of 2,356 other drawn schemas, with 28,000 documents, none was
widened, though a vocabulary of single bytes can spell lone surrogates in strings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from runtime.grammar.automata.charset import SURROGATES, Ranges, difference
from runtime.grammar.automata.regex_syntax import Chars, nodes_of, parse, without_conditions
from runtime.grammar.ebnf import tree
from runtime.grammar.json_schema.document import (
    KIND,
    SchemaDocument,
    SchemaPath,
    known,
    mistake,
    show,
    unsupported,
)
from runtime.grammar.json_schema.schema_regex import ORDER
from runtime.grammar.json_schema.shapes import (
    KEYWORDS,
    MAX_IGNORED,
    check_shapes,
    endless,
    is_of,
    leaves,
    shown,
    unknown_keywords,
)
from runtime.grammar.json_schema.texts.ecma import spell
from runtime.grammar.json_schema.texts.formats import CHECKED, FORMATS
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

UNKEPT = frozenset({
    "$dynamicRef", "$recursiveRef", "additionalItems", "allOf", "contains", "dependencies",
    "dependentRequired", "dependentSchemas", "else", "if", "maxContains", "minContains", "minProperties",
    "multipleOf", "not", "oneOf", "patternProperties", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties", "uniqueItems",
})  # fmt: skip
"""Keywords that it ignores, or keeps only sometimes."""

_ALONE = ("$ref", "anyOf", "enum", "const")
"""Beside one of these it ignores all others, such as `type`."""
_STRINGS = ("pattern", "format", "minLength", "maxLength")
"""It keeps one of these, or both lengths."""
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_TYPED = frozenset({*_STRINGS, *_NUMBERS, "maxItems", "maxProperties", "minItems", "required"})
"""Ignored if the schema has no type: it infers one from `properties`, `items` and the like."""
_FORMATS = frozenset({"duration", "email", "hostname", "uri", "uri-reference", "uuid"})
"""Formats that it keeps. For others it takes the 31st of November, 01.2.3.4, or anything."""
_ESCAPED: Ranges = ((0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C), *SURROGATES)
"""Characters that JSON escapes, which the library does not if a pattern allows no others; and surrogates."""
_INFERRED = {"object": {"properties", "additionalProperties"}, "array": {"items", "prefixItems"}}
_POINTER = re.compile(r"#(/[^~%]*)?")
"""References that it follows."""
_LARGEST = 10**15
"""It rounds larger numbers."""
_MAX_NODES = 1500
_CHARACTERS = 2
"""States that one character of a bounded string takes, about."""


class Kept(NamedTuple):
    """What keeping a schema costs. work: states that its counts are written out to. narrowed: what it allows
    and the library does not offer. ignored: what has no effect."""

    work: int
    narrowed: tuple[str, ...]
    ignored: tuple[str, ...]


def check(document: SchemaDocument) -> Kept:
    """Read the schema in `document`, and write out what the library infers: the type, and `items`, without
    which it would leave an array empty. Raises UnsupportedConstraint (keyword, path) or BadConstraint."""
    work = 0
    narrowed: dict[str, None] = {}
    ignored = dict.fromkeys(document.ignored)
    paths: list[SchemaPath] = []
    for path, node in document.reachable():
        paths.append(path)
        if len(paths) > _MAX_NODES:
            # Long chains of choices take the library a time that grows with a power of their length.
            raise UnsupportedConstraint(
                f"has more than {_MAX_NODES} subschemas", where=KIND, hint='grammar backend "auto" takes more'
            )
        check_shapes(path, node, document.draft)
        for reason in _unkept(document, path, node):
            raise _refused(reason, path)
        work += _work(path, node)
        if len(node.get("properties", ())) > 1:
            narrowed[ORDER] = None
        narrowed |= dict.fromkeys(f"{what} at {show(path)}" for what in _left_out(node))
        ignored |= dict.fromkeys(unknown_keywords(path, node, document.draft))
        if not _is_known_format(node):
            ignored[f"format {node['format']!r} at {show(path)}"] = None
        for kind, keywords in _INFERRED.items():
            if keywords & node.keys():
                node.setdefault("type", kind)
        if "array" in node.get("type", ()) and "prefixItems" not in node:
            node.setdefault("items", True)
    dead = endless(document)
    for path in paths:
        if path in dead:
            text = "no finite value matches it, and xgrammar would begin one"
            raise unsupported(text, path, 'take it out, or use grammar backend "auto"')
    return Kept(work, tuple(narrowed)[:MAX_IGNORED], tuple(ignored)[:MAX_IGNORED])


def _refused(what: str, path: SchemaPath) -> UnsupportedConstraint:
    hint = 'grammar backend "auto" chooses one that keeps it'
    return unsupported(f"{what} is not kept exactly by xgrammar", path, hint)


def _is_known_format(node: Mapping[str, Any]) -> bool:
    return "format" not in node or node["format"] in FORMATS or node["format"] in CHECKED


def _unkept(document: SchemaDocument, path: SchemaPath, node: Mapping[str, Any]) -> Iterator[str]:
    """The keywords of one schema object that XGrammar does not enforce."""
    if "$ref" in node and not (_POINTER.fullmatch(node["$ref"]) and document.targets[path]):
        yield f"$ref {node['$ref']!r}"
    keywords = [word for word in node if word in KEYWORDS or word in UNKEPT or word in _ALONE]
    for word in keywords:
        if word in UNKEPT:
            yield word
        elif not known(word, document.draft):
            yield f"{word}, which means nothing in this draft,"
        elif word in _TYPED and not {"type", "properties", "items"} & node.keys():
            yield f"{word} without a type"
    for word in (word for word in _ALONE if word in node):
        beside = {word, "type"} if word in ("enum", "const") else {word}
        yield from (f"{other} beside {word}" for other in keywords if other not in beside)
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
    for value in leaves(listed):
        if type(value) is int and abs(value) >= _LARGEST:
            yield f"the value {shown(value)}, of more than 15 digits,"


def _work(path: SchemaPath, node: Mapping[str, Any]) -> int:
    """States that the counts of a schema come to. Raises UnsupportedConstraint or BadConstraint."""
    text, items = (
        max(int(node.get(f"min{of}", 0)), int(node.get(f"max{of}", 0))) for of in ("Length", "Items")
    )
    return _CHARACTERS * text + items + (_states(node["pattern"], path) if "pattern" in node else 0)


def _states(pattern: str, path: SchemaPath) -> int:
    try:
        root = without_conditions(parse(spell(pattern).python))
    except UnsupportedConstraint as error:
        raise _refused(f"pattern {shown(pattern)} ({error.message})", path) from None
    except BadConstraint as error:
        raise mistake(error.message, (*path, "pattern")) from None
    classes = (node.ranges for node in nodes_of(root) if isinstance(node, Chars))
    if "[^]" in pattern or any(not difference(ranges, _ESCAPED) for ranges in classes):
        raise _refused(f"pattern {shown(pattern)}, of a character that JSON escapes,", path)
    return tree.counted(tree.Grammar({"root": root}))


def _left_out(node: Mapping[str, Any]) -> Iterator[str]:
    """What a schema object allows and the library does not offer."""
    if "type" not in node and any(keywords & node.keys() for keywords in _INFERRED.values()):
        yield "values of other types"
    if (node.get("properties") or "maxProperties" in node) and "additionalProperties" not in node:
        yield "properties that it does not name"
    if "prefixItems" in node and "items" not in node:
        yield f"items after the first {len(node['prefixItems'])}"
    if "minLength" in node or "maxLength" in node:
        yield "quotes, backslashes and control characters in strings"
    if not (node.get("pattern", "^$").startswith("^") and node.get("pattern", "^$").endswith("$")):
        yield "text around what the pattern finds"
