"""Values as masks offer them: members in an order that a matcher takes, scalars spelled shortest."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

from runtime.grammar.base import Matcher
from runtime.protocol.errors import BadConstraint

WORK = 12
"""Bytes that are tried for each byte of a value; where they are not enough the value counts as not taken."""

_Then = Callable[[Matcher, bytes], bytes | None]


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


def is_offered(value: Any) -> bool:
    """Whether masks offer texts for the characters of `value`: strings there hold none that JSON escapes by
    number, and no leap second but in UTC, for which a time has to be computed."""
    text = json.dumps(value, ensure_ascii=False)
    return not re.search(r"\x7f|\\u[0-9a-f]{4}|\d\d:\d\d:60(\.\d+)?[-+]", text)


def takes_value(start: Matcher, value: Any, schema: Any = None) -> bool:
    """Whether `start` takes some text of `value` as a whole."""
    return written(start, value, schema) is not None


def written(start: Matcher, value: Any, schema: Any = None) -> bytes | None:
    """A text of `value` that `start` takes as a whole; None where none was found."""
    ordered = in_order(value, named_in(schema))
    for separators in ((b", ", b": "), (b",", b":")):
        found = _Search(*separators).whole(start, ordered)
        if found is not None:
            return found
    return None


class _Search:
    def __init__(self, comma: bytes, colon: bytes) -> None:
        self._comma, self._colon = comma, colon
        self._work = 0

    def whole(self, start: Matcher, value: Any) -> bytes | None:
        self._work = WORK * len(json.dumps(value)) + 400
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(20_000)  # some calls for each part of the text
        try:
            return self._value(start, b"", value, lambda end, text: text if end.may_stop() else None)
        except (BadConstraint, RecursionError):
            return None
        finally:
            sys.setrecursionlimit(before)

    def _say(self, matcher: Matcher, text: bytes, data: bytes, then: _Then) -> bytes | None:
        self._work -= len(data)
        ahead = matcher.copy()
        return then(ahead, text + data) if self._work > 0 and ahead.advance_bytes(data) else None

    def _value(self, matcher: Matcher, text: bytes, value: Any, then: _Then) -> bytes | None:
        if isinstance(value, dict | list):
            named = isinstance(value, dict)
            inside = list(value.items()) if named else [(None, item) for item in value]

            def open_(ahead: Matcher, text: bytes) -> bytes | None:
                return self._members(ahead, text, inside, b"", then, named)

            return self._say(matcher, text, b"{" if named else b"[", open_)
        said = [json.dumps(value, ensure_ascii=False)]
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            said.insert(0, json.dumps(int(value)))
        for one in said:
            found = self._say(matcher, text, one.encode("utf-8", "surrogatepass"), then)
            if found is not None:
                return found
        return None

    def _members(
        self,
        matcher: Matcher,
        text: bytes,
        left: list[tuple[Any, Any]],
        before: bytes,
        then: _Then,
        named: bool,
    ) -> bytes | None:
        if not left:
            return self._say(matcher, text, b"}" if named else b"]", then)
        for at, (name, inner) in enumerate(left if named else left[:1]):
            key = json.dumps(name, ensure_ascii=False).encode() + self._colon if named else b""
            rest = left[:at] + left[at + 1 :]

            def on(ahead: Matcher, text: bytes, rest: Any = rest) -> bytes | None:
                return self._members(ahead, text, rest, self._comma, then, named)

            def tell(ahead: Matcher, text: bytes, inner: Any = inner, on: _Then = on) -> bytes | None:
                return self._value(ahead, text, inner, on)

            found = self._say(matcher, text, before + key, tell)
            if found is not None:
                return found
        return None
