"""Values as masks offer them: members in an order that a matcher takes, scalars spelled shortest."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from runtime.grammar.base import Matcher
from runtime.protocol.errors import BadConstraint

WORK = 20_000
"""Bytes that are tried; where they are not enough the value counts as not taken."""

_Then = Callable[[Matcher], bool]


def names_of(schema: Any) -> dict[str, int]:
    """The names that a schema's `properties` list, in their order."""
    found: dict[str, int] = {}
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if isinstance(node.get("properties"), dict):
                for name in node["properties"]:
                    found.setdefault(name, len(found))
            waiting.extend(reversed(list(node.values())))
        elif isinstance(node, list):
            waiting.extend(reversed(node))
    return found


def takes_value(start: Matcher, value: Any, schema: Any = None) -> bool:
    """Whether `start` takes some text of `value` as a whole."""
    return any(
        _Search(names_of(schema), *separators).whole(start, value)
        for separators in ((b", ", b": "), (b",", b":"))
    )


class _Search:
    def __init__(self, order: dict[str, int], comma: bytes, colon: bytes) -> None:
        self._order, self._comma, self._colon = order, comma, colon
        self._work = WORK

    def whole(self, start: Matcher, value: Any) -> bool:
        try:
            return self._value(start, value, lambda end: end.may_stop())
        except (BadConstraint, RecursionError):
            return False

    def _after(self, matcher: Matcher, data: bytes) -> Matcher | None:
        self._work -= len(data)
        ahead = matcher.copy()
        return ahead if self._work > 0 and ahead.advance_bytes(data) else None

    def _value(self, matcher: Matcher, value: Any, then: _Then) -> bool:
        if isinstance(value, dict | list):
            opened = self._after(matcher, b"{" if isinstance(value, dict) else b"[")
            inside = list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]
            inside.sort(key=lambda pair: self._order.get(pair[0], len(self._order)))
            return opened is not None and self._members(opened, inside, b"", then, isinstance(value, dict))
        whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
        texts = [json.dumps(int(value))] if whole else []
        texts.append(json.dumps(value, ensure_ascii=False))
        return any(
            (ended := self._after(matcher, text.encode("utf-8", "surrogatepass"))) is not None and then(ended)
            for text in texts
        )

    def _members(
        self, matcher: Matcher, left: list[tuple[Any, Any]], before: bytes, then: _Then, named: bool
    ) -> bool:
        if not left:
            ended = self._after(matcher, b"}" if named else b"]")
            return ended is not None and then(ended)
        for at, (name, inner) in enumerate(left if named else left[:1]):
            key = json.dumps(name, ensure_ascii=False).encode() + self._colon if named else b""
            begun = self._after(matcher, before + key)
            rest = left[:at] + left[at + 1 :]
            if begun is not None and self._value(
                begun, inner, lambda ahead, rest=rest: self._members(ahead, rest, self._comma, then, named)
            ):  # fmt: skip
                return True
        return False
