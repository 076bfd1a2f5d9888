"""Values as masks offer them: members in an order that a matcher takes, scalars spelled shortest."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from runtime.grammar.base import Matcher
from runtime.protocol.errors import BadConstraint

WORK = 12
"""Bytes that are tried for each byte of a value; where they are not enough the value counts as not taken."""


def named_in(schema: Any) -> list[dict[str, int]]:
    """The names that each `properties` of a schema lists, in their order."""
    found: list[dict[str, int]] = []
    waiting = [schema]
    for node in waiting:
        if isinstance(node, dict):
            if isinstance(node.get("properties"), dict):
                found.append({name: number for number, name in enumerate(node["properties"])})
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return found


def in_order(value: Any, named: list[dict[str, int]]) -> Any:
    """`value` with the members of each object in the order of the `properties` that name them all; where none
    do, of those that name each first."""
    if isinstance(value, list):
        return [in_order(item, named) for item in value]
    if not isinstance(value, dict):
        return value
    whole = next((names for names in named if value.keys() <= names.keys()), None)
    order: dict[str, int] = {}
    for names in [whole] if whole is not None else named:
        for name in names:
            order.setdefault(name, len(order))
    names = sorted(value, key=lambda name: order.get(name, len(order)))
    return {name: in_order(value[name], named) for name in names}


def shortest(value: Any) -> Any:
    """`value` with whole numbers as integers, as they are written: draft 4 tells 1.0 from 1."""
    match value:
        case list():
            return [shortest(item) for item in value]
        case dict():
            return {name: shortest(item) for name, item in value.items()}
        case float() if value.is_integer() and abs(value) < 2**53:
            return int(value)
        case _:
            return value


def is_offered(value: Any) -> bool:
    """Whether masks offer texts for all of `value`: strings there hold no characters that JSON escapes by
    number, and no leap second but in UTC, for which a time has to be computed; integers no exponent."""
    text = json.dumps(value, ensure_ascii=False)
    return not re.search(r"\x7f|\\u[0-9a-f]{4}|\d\d:\d\d:60(\.\d+)?[-+]|\de[-+]?\d", text)


def takes_value(start: Matcher, value: Any, schema: Any = None) -> bool:
    """Whether `start` takes some text of `value` as a whole."""
    return written(start, value, schema) is not None


def written(start: Matcher, value: Any, schema: Any = None) -> bytes | None:
    """A text of `value` that `start` takes as a whole; None where none was found."""
    ordered = in_order(value, named_in(schema))
    for each in (False, True):
        for separators in ((b", ", b": "), (b",", b":")):
            found = _Search(*separators, each).whole(start, ordered)
            if found is not None:
                return found
    return None


_Place = tuple[Matcher, bytes]


class _Search:
    """Of an object the orders of its members are tried one after another. each: also further orders of what
    stands inside, where what follows does not fit behind the first that did: a schema with several branches
    may take one order at its end only in some of them."""

    def __init__(self, comma: bytes, colon: bytes, each: bool) -> None:
        self._comma, self._colon, self._tells = comma, colon, None if each else 1
        self._work = 0

    def whole(self, start: Matcher, value: Any) -> bytes | None:
        self._work = WORK * len(json.dumps(value)) + 400
        try:
            ends = self._value((start, b""), value)
            return next((end[1] for end in ends if end[0].may_stop()), None)
        except (BadConstraint, RecursionError):
            return None

    def _say(self, place: _Place, data: bytes) -> Iterator[_Place]:
        self._work -= len(data)
        ahead = place[0].copy()
        if self._work > 0 and ahead.advance_bytes(data):
            yield ahead, place[1] + data

    def _value(self, place: _Place, value: Any) -> Iterator[_Place]:
        if isinstance(value, dict | list):
            named = isinstance(value, dict)
            inside = list(value.items()) if named else [(None, item) for item in value]
            for opened in self._say(place, b"{" if named else b"["):
                yield from self._members(opened, inside, b"", named)
            return
        said = [json.dumps(value, ensure_ascii=False)]
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            said.insert(0, json.dumps(int(value)))
        for one in said:
            yield from self._say(place, one.encode("utf-8", "surrogatepass"))

    def _members(
        self, place: _Place, left: list[tuple[Any, Any]], before: bytes, named: bool
    ) -> Iterator[_Place]:
        if not left:
            yield from self._say(place, b"}" if named else b"]")
        for at, (name, inner) in enumerate(left if named else left[:1]):
            key = json.dumps(name, ensure_ascii=False).encode() + self._colon if named else b""
            for begun in self._say(place, before + key):
                for told in islice(self._value(begun, inner), self._tells):
                    yield from self._members(told, left[:at] + left[at + 1 :], self._comma, named)
