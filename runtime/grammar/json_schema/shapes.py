"""The keywords of JSON Schema: in which drafts they are known, what their values must look like, to which
members their subschemas apply, and which keywords of a schema have no effect.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Container, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from runtime.grammar.json_schema.document import (
    SAME_VALUE,
    SchemaDocument,
    SchemaPath,
    known,
    mistake,
    show,
    unsupported,
)
from runtime.grammar.json_schema.texts.ecma import matches_pattern

_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

Test = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _schema(value: Any) -> bool:
    return isinstance(value, (bool, Mapping))


def _type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in _TYPES for name in names)


_COUNT: tuple[Test, str] = (
    lambda value: _number(value) and value >= 0 and float(value).is_integer(),
    "a count: a whole number, 0 or more",
)
_NUMBER = (_number, "a finite number")
_SCHEMA = (_schema, "a schema: an object or a boolean")
_SCHEMAS: tuple[Test, str] = (
    lambda value: isinstance(value, list) and bool(value) and all(map(_schema, value)),
    "a non-empty list of schemas",
)
_MAP: tuple[Test, str] = (
    lambda value: isinstance(value, Mapping) and all(map(_schema, value.values())),
    "an object whose values are schemas",
)
_TEXT: tuple[Test, str] = (lambda value: isinstance(value, str), "a string")

_SHAPES: dict[str, tuple[Test, str]] = {
    "type": (_type, f"one or more of {', '.join(_TYPES)}"),
    "enum": (lambda value: isinstance(value, list), "a list of values"),
    "multipleOf": (lambda value: _number(value) and value > 0, "a number above 0"),
    "minimum": _NUMBER,
    "maximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,
    "exclusiveMaximum": _NUMBER,
    "required": (_strings, "a list of strings"),
    "uniqueItems": (lambda value: isinstance(value, bool), "a boolean"),
    "items": (
        lambda value: _schema(value) or (isinstance(value, list) and all(map(_schema, value))),
        "a schema, or a list of schemas",
    ),
    "dependentRequired": (
        lambda value: isinstance(value, Mapping) and all(map(_strings, value.values())),
        "an object of lists of strings",
    ),
    "dependencies": (
        lambda value: (
            isinstance(value, Mapping) and all(_strings(item) or _schema(item) for item in value.values())
        ),
        "an object of schemas and lists of strings",
    ),
    "format": _TEXT,
    "pattern": _TEXT,
    "$ref": _TEXT,
    "$dynamicRef": _TEXT,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties"), _COUNT),
    **dict.fromkeys(("maxProperties", "minContains", "maxContains"), _COUNT),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), _SCHEMAS),
    **dict.fromkeys(("properties", "patternProperties", "dependentSchemas"), _MAP),
    **dict.fromkeys(("not", "if", "then", "else", "contains", "propertyNames"), _SCHEMA),
    **dict.fromkeys(("additionalProperties", "additionalItems"), _SCHEMA),
    **dict.fromkeys(("unevaluatedProperties", "unevaluatedItems"), _SCHEMA),
}
_DRAFT_3 = {"disallow": "not", "extends": "allOf", "divisibleBy": "multipleOf"}
"""Keywords that no later draft knows, and their replacements."""


KEYWORDS = ("const", *_SHAPES)
"""All assertions and applicators, of all drafts."""


def check_shapes(path: SchemaPath, node: Mapping[str, Any], draft: int) -> None:
    """Raises BadConstraint for the first keyword of `node` whose value is not of its kind, and
    UnsupportedConstraint for one of draft 3."""
    for word, value in node.items():
        if word in _DRAFT_3:
            text = f"{word} is a keyword of draft 3, which is not supported"
            raise unsupported(text, (*path, word), f"use {_DRAFT_3[word]}")
        shape = _SHAPES.get(word)
        if shape is None or not known(word, draft):
            continue
        if word.startswith("exclusive") and draft <= 4 and isinstance(value, bool):
            continue
        if not shape[0](value):
            raise mistake(f"{word} must be {shape[1]}, not {shown(value)}", (*path, word))


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


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


def leaves(value: Any) -> Iterator[Any]:
    """The plain values in a JSON value, and the names of members."""
    match value:
        case list():
            for item in value:
                yield from leaves(item)
        case dict():
            yield from value
            yield from leaves(list(value.values()))
        case _:
            yield value


def canonical(value: object) -> str:
    """A text that is equal for values that JSON Schema calls equal."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: object) -> object:
    match value:
        case float() if value.is_integer():
            return int(value)
        case list():
            return [_plain(item) for item in value]
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case _:
            return value


# -- subschemas that apply to members


def member_paths(document: SchemaDocument, path: SchemaPath, name: str) -> Iterator[SchemaPath]:
    """The subschemas of the schema at `path` that apply to the member `name` of an object."""
    node = document.node(path)
    if not isinstance(node, Mapping) or document.alone(node):
        return
    named = False
    if name in node.get("properties", {}):
        named = True
        yield (*path, "properties", name)
    for pattern in node.get("patternProperties", {}):
        if matches_pattern(pattern, name):
            named = True
            yield (*path, "patternProperties", pattern)
    rest = _rest(document, node, "additionalProperties", "unevaluatedProperties")
    if not named and rest:
        yield (*path, rest)


def item_paths(document: SchemaDocument, path: SchemaPath, index: int) -> Iterator[SchemaPath]:
    """The subschemas of the schema at `path` that apply to an item of an array."""
    node = document.node(path)
    if not isinstance(node, Mapping) or document.alone(node):
        return
    word = "items" if isinstance(node.get("items"), list) else "prefixItems"
    first = node.get(word, ()) if word == "items" or document.draft >= 2020 else ()
    if index < len(first):
        yield (*path, word, index)
    elif word == "items":
        if rest := _rest(document, node, "additionalItems", "unevaluatedItems"):
            yield (*path, rest)
    else:
        rest = _rest(document, node, "items", "unevaluatedItems")
        if rest == "items" or (rest and "contains" not in node):
            yield (*path, rest)


def _rest(document: SchemaDocument, node: Mapping[str, Any], word: str, unevaluated: str) -> str:
    """The keyword for members that no other keyword names. Beside schemas for the same value, what is
    unevaluated is known and validated when the whole closes."""
    if word in node:
        return word
    if unevaluated not in node or not known(unevaluated, document.draft):
        return ""
    return "" if any(other in node for other in SAME_VALUE) else unevaluated


# -- schemas without finite values


def endless(document: SchemaDocument) -> set[SchemaPath]:
    """The schemas that only infinite values match, since they need themselves."""
    if document.scoped or not any(document.targets.values()):
        return set()
    users: dict[SchemaPath, list[SchemaPath]] = {}
    for path, targets in document.targets.items():
        for part in (*(target.path for target in targets.values()), *document.parts[path]):
            users.setdefault(part, []).append(path)
    open_, looked_at = set(document.objects), set[SchemaPath]()
    queue = list(document.objects)
    while queue:
        path = queue.pop()
        looked_at.add(path)
        if path in open_ and _ends(document, path, open_):
            open_.remove(path)
            queue += looked_at.intersection(users.get(path, ()))
    return open_


def _ends(document: SchemaDocument, path: SchemaPath, open_: Container[SchemaPath]) -> bool:
    """Whether some value of a schema needs none of the schemas `open_`; True if that is hard to tell."""
    if any(target.path in open_ for target in document.targets[path].values()):
        return False
    node = document.objects[path]
    if document.alone(node):
        return True
    parts: dict[str | int, list[bool]] = {}
    for inner in document.parts[path]:
        parts.setdefault(inner[len(path)], []).append(inner not in open_)
    choices = [parts[word] for word in ("anyOf", "oneOf") if word in parts]
    if not all(parts.get("allOf", ())) or not all(map(any, choices)):
        return False
    if node.get("type") == "object" and _strings(node.get("required")):
        return not any((*path, "properties", name) in open_ for name in node["required"])
    if node.get("type") == "array" and _number(node.get("minItems")) and "prefixItems" not in node:
        if node["minItems"] <= 0:
            return True
        return not any((*path, word) in open_ for word in ("items", "unevaluatedItems"))
    return True


# -- keywords without effect

MAX_IGNORED = 20
"""Lines for one schema, at most."""

_ANNOTATIONS = frozenset(
    {
        "$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor", "$recursiveRef", "$ref",
        "$dynamicRef", "$vocabulary", "$comment", "$defs", "definitions", "title", "description", "default",
        "deprecated", "readOnly", "writeOnly", "examples", "example", "const", "discriminator",
        "externalDocs", "xml",
    }
)  # fmt: skip
"""Keywords of all drafts, and of OpenAPI, that do not constrain values, or that are read elsewhere."""

_CONTENT = ("contentEncoding", "contentMediaType", "contentSchema")
"""Annotations since draft 2019-09, and optional before."""


def unknown_keywords(path: SchemaPath, node: Mapping[str, Any], draft: int) -> Iterator[str]:
    """A line for each keyword at `path` that has no effect. Names that begin with "x-" are extensions."""
    for word in node:
        if word in _ANNOTATIONS or word.startswith("x-"):
            continue
        if word in _CONTENT:
            yield f"{word} {str(node[word])[:80]!r} at {show(path)} (an annotation)"
        elif word not in KEYWORDS:
            near = difflib.get_close_matches(word[:80], KEYWORDS, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            yield f"keyword {word[:80]!r} at {show(path)}{hint}"
        elif not known(word, draft):
            yield f"keyword {word!r} at {show(path)} (not of its draft)"


# -- decimal bounds


def shorter_within(bounds: Mapping[str, float], divisor: float | None) -> list[float]:
    """The bounds cut to fewer decimals, if they are within all of `bounds` (minimum, ...) and multiples of
    `divisor`: of a bound such as 0.99 the engine does not take the prefix 0.9."""
    shorter: dict[float, None] = {}
    for bound in bounds.values():
        whole, _, decimals = f"{Decimal(repr(bound)):f}".partition(".")
        for count in range(1, len(decimals)):
            text = f"{whole}.{decimals[:count]}"
            if float(text) and _is_within(Fraction(text), bounds, divisor):
                shorter[float(text)] = None
    return [int(value) if value.is_integer() else value for value in shorter]


def between_multiples(bounds: Mapping[str, float], divisor: float) -> dict[str, float]:
    """Bounds with the same multiples of a fractional `divisor` within them, a quarter of it away from the
    nearest: the engine counts multiples in floating point. Unchanged if no multiple is within."""
    step, lowest, highest = Fraction(repr(divisor)), None, None
    for word, bound in bounds.items():
        ratio = Fraction(repr(bound)) / step
        if word.lower().endswith("minimum"):
            first = math.floor(ratio) + 1 if word.startswith("exclusive") else math.ceil(ratio)
            lowest = first if lowest is None else max(lowest, first)
        else:
            last = math.ceil(ratio) - 1 if word.startswith("exclusive") else math.floor(ratio)
            highest = last if highest is None else min(highest, last)
    if lowest is not None and highest is not None and lowest > highest:
        return dict(bounds)
    quarter, moved = Fraction(1, 4), {}
    if lowest is not None:
        moved["minimum"] = float((lowest - quarter) * step)
    if highest is not None:
        moved["maximum"] = float((highest + quarter) * step)
    return moved


def _is_within(value: Fraction, bounds: Mapping[str, float], divisor: float | None) -> bool:
    for word, bound in bounds.items():
        limit = Fraction(repr(bound))
        if value == limit and word.startswith("exclusive"):
            return False
        if value < limit if word.lower().endswith("minimum") else value > limit:
            return False
    return divisor is None or (value / Fraction(repr(divisor))).denominator == 1
