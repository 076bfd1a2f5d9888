"""StringMatcher: masks inside of plain strings without asking the engine again.

Within a string that no format or enum speaks of, and no pattern but one set of characters repeated, what may
follow depends on how many characters it still may have, and on nothing else of it. So one mask of the engine
serves the whole string: of a bounded one, less the tokens that are too long by now. It knows the lowered
schema, and nothing of the engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from runtime.grammar.base import Matcher, earliest
from runtime.grammar.json_schema import tracker as at
from runtime.grammar.json_schema.residual import Duty
from runtime.grammar.json_schema.tracker import JsonTracker, Place
from runtime.grammar.token_bits import Bits, TokenBits
from runtime.plan import TokenMask

_KNOWN = {
    "type", "properties", "required", "additionalProperties", "items", "prefixItems", "minItems", "maxItems",
    "minLength", "maxLength", "enum", "const", "pattern", "format", "minimum", "maximum", "exclusiveMinimum",
    "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties", "$ref", "$defs", "anyOf",
    "x-guidance",
}  # fmt: skip
_DEFINITION = "#/$defs/"
_UNPLAIN = {"enum", "const", "format"}
_REPEATED = re.compile(r"\^(\[[^\[\]]+\])(?:([*+])|\{(\d+)(?:(,)(\d*))?\})\$")
"""A pattern, as a lowered schema spells it, of one set of characters."""
_KEPT = 256
_ESCAPE = re.compile(rb"\\[^u]", re.DOTALL)
_CHARACTER = re.compile(rb'\\u[0-9a-fA-F]{0,4}|\\[^u]?|[^"\\\x80-\xbf][\x80-\xbf]*|[\x80-\xbf]+', re.DOTALL)


class Bound(NamedTuple):
    """A string of at least `low` and at most `high` characters, None = any number; `of` which, "" = any."""

    low: int
    high: int | None
    of: str = ""


class Strings(Duty):
    """What strings may be at one place of a document: `bound`, None where that is not known or not all of it.

    Takes a duty's part in the tracker, and owes nothing.
    """

    places, impossible, unique, minds_names = (), False, False, False

    def __init__(self, nodes: list[Mapping[str, Any]] | None, definitions: Mapping[str, Any]) -> None:
        self._nodes, self._definitions = nodes, definitions
        self._inner: dict[str | int, Strings] = {}
        self.bound = _bound(nodes) if nodes is not None else None

    @classmethod
    def of(cls, schema: Any) -> Strings:
        definitions = schema.get("$defs", {}) if isinstance(schema, Mapping) else {}
        return cls(expand(schema, definitions, frozenset()), definitions)

    def member(self, name: str) -> Strings:
        def chosen(node: Mapping[str, Any]) -> Any:
            return node.get("properties", {}).get(name, node.get("additionalProperties", True))

        return self._at(name, "object", chosen)

    def item(self, index: int) -> Strings:
        def chosen(node: Mapping[str, Any]) -> Any:
            first = node.get("prefixItems", ())
            return first[index] if index < len(first) else node.get("items", True)

        return self._at(index, "array", chosen)

    def _at(self, step: str | int, kind: str, chosen: Any) -> Strings:
        known = self._inner.get(step)
        if known is None:
            known = Strings(self._after(kind, chosen), self._definitions)
            if len(self._inner) < _KEPT:
                self._inner[step] = known
        return known

    def _after(self, kind: str, chosen: Any) -> list[Mapping[str, Any]] | None:
        if self._nodes is None:
            return None
        found: list[Mapping[str, Any]] = []
        for node in self._nodes:
            if not takes(node, kind):
                continue
            inner = expand(chosen(node), self._definitions, frozenset())
            if inner is None or node.keys() & {"enum", "const"}:
                return None
            found += inner
        return found

    def name_fault(self, name: str) -> str | None:
        return None


def expand(node: Any, definitions: Mapping[str, Any], met: frozenset[str]) -> list[Mapping[str, Any]] | None:
    """The schemas of which a value under `node` has to match one; None where there is more to it."""
    if isinstance(node, bool):
        return [{}] if node else []
    if not isinstance(node, Mapping) or not is_known(node):
        return None
    rest = node.keys() - {"$defs", "x-guidance"}
    if "$ref" in node:
        name = str(node["$ref"]).removeprefix(_DEFINITION)
        if rest != {"$ref"} or name not in definitions or name in met:
            return None
        return expand(definitions[name], definitions, met | {name})
    if "anyOf" in node:
        found: list[Mapping[str, Any]] = []
        for option in node["anyOf"] if rest == {"anyOf"} else ():
            inner = expand(option, definitions, met)
            if inner is None:
                return None
            found += inner
        return found or None
    return [node]


def takes(node: Mapping[str, Any], kind: str) -> bool:
    """Whether `node` may take a value of this kind: string, object or array."""
    kinds = node.get("type")
    if kinds is None and node.keys() & {"enum", "const"}:
        values = [node["const"]] if "const" in node else node["enum"]
        return any(isinstance(value, _PYTHON[kind]) for value in values)
    return kinds is None or kind == kinds or (isinstance(kinds, list) and kind in kinds)


_PYTHON: dict[str, type] = {"string": str, "object": dict, "array": list}


def is_known(node: Mapping[str, Any], more: frozenset[str] = frozenset()) -> bool:
    """Whether all that `node` says is understood here; `more`: keywords besides."""
    return node.keys() <= _KNOWN | more and not isinstance(node.get("items"), list)


def counted_set(pattern: str) -> Bound | None:
    """A pattern, as a lowered schema spells it, of one set of characters, counted."""
    one = _REPEATED.fullmatch(pattern)
    return None if one is None else _counted(*one.groups())


def _bound(nodes: list[Mapping[str, Any]]) -> Bound | None:
    """The bound that all of `nodes` that take strings share."""
    found: set[Bound] = set()
    for node in nodes:
        kinds = node.get("type", "string")
        if kinds != "string" and "string" not in (kinds if isinstance(kinds, list) else ()):
            continue
        if node.keys() & _UNPLAIN:
            return None
        if "pattern" not in node:
            found.add(Bound(node.get("minLength", 0), node.get("maxLength")))
            continue
        one = counted_set(node["pattern"])
        if one is None or node.keys() & {"minLength", "maxLength"}:
            return None
        found.add(one)
    return found.pop() if len(found) == 1 else None


def _counted(of: str, sign: str | None, low: str, comma: str | None, high: str | None) -> Bound:
    if sign is not None:
        return Bound(int(sign == "+"), None, of)
    return Bound(int(low), int(high) if high else None if comma else int(low), of)


class Lengths:
    """The tokens of a vocabulary by how many characters they add to a string under way, up to a quote that
    ends it; an escape is one, and so is the beginning of one. Made once for a vocabulary."""

    def __init__(self, bits: TokenBits) -> None:
        self.bits = bits
        counts = np.fromiter(map(_count, bits.texts), np.int64, bits.width)
        self.most = int(counts.max(initial=0))
        self._counts = counts
        self._within: dict[int, Bits] = {}

    def within(self, length: int) -> Bits:
        """The tokens that add at most `length` characters."""
        found = self._within.get(length)
        if found is None:
            found = self._within[length] = self.bits.pack(self._counts <= length)
        return found


def _count(data: bytes) -> int:
    if data.isascii() and b'"' not in data and b"\\" not in data:
        return len(data)
    count = place = 0
    while (one := _CHARACTER.match(data, place)) is not None:
        count, place = count + 1, one.end()
    return count


def characters(data: bytes) -> int | None:
    """How many characters a string has that `data` spells so far; None in the middle of one, and where code
    points are spelled in hexadecimal."""
    escapes = 0
    if b"\\" in data:
        escapes = len(_ESCAPE.findall(data))
        data = _ESCAPE.sub(b"", data)
        if b"\\" in data:
            return None
    try:
        return len(data.decode()) + escapes
    except UnicodeDecodeError:
        return None


class _Step(NamedTuple):
    """What was before one successful call. place: None once the text could not be followed here."""

    place: Place | None
    before: _Step | None


class _Known(NamedTuple):
    """The engine's mask in the string that began at `start`, after `length` characters of it."""

    start: int
    length: int
    mask: TokenMask


class StringMatcher(Matcher):
    """`inner` follows the language; `tracker`, over Strings, where in a document this is."""

    def __init__(self, inner: Matcher, tracker: JsonTracker, lengths: Lengths) -> None:
        self._inner, self._tracker, self._lengths = inner, tracker, lengths
        self._last: _Step | None = None
        self._lost = False
        self._known: _Known | None = None
        self._mask: TokenMask | None = None
        self.origin, self.vocabulary = inner.origin, inner.vocabulary

    def advance(self, token: int) -> bool:
        if not self._inner.advance(token):
            return False
        return self._follow(self._lengths.bits.texts[token])

    def advance_bytes(self, data: bytes) -> bool:
        return self._inner.advance_bytes(data) and self._follow(data)

    def _follow(self, data: bytes) -> bool:
        self._last = _Step(None if self._lost else self._tracker.place, self._last)
        self._mask = None
        if data:
            self._lost = self._lost or not self._tracker.feed(data)
        return True

    def mask(self) -> TokenMask:
        if self._mask is None:
            self._mask = self._make()
        return self._mask

    def _make(self) -> TokenMask:
        place = self._tracker.place
        if self._lost or place.mode != at.STRING or place.escaped:
            return self._inner.mask()
        duty = place.duty
        bound = duty.bound if isinstance(duty, Strings) else None
        length = None if bound is None else characters(self._tracker.since(place.start + 1))
        if bound is None or length is None or length < bound.low:
            return self._inner.mask()
        known = self._known
        if known is None or known.start != place.start or length < known.length:
            known = self._known = _Known(place.start, length, self._inner.mask())
        if bound.high is None or bound.high - length >= self._lengths.most or length == known.length:
            return known.mask
        bits = self._lengths.bits
        return bits.seal(known.mask.bits & self._lengths.within(bound.high - length))

    def forced_bytes(self) -> bytes:
        return self._inner.forced_bytes()

    def may_stop(self) -> bool:
        return self._inner.may_stop()

    def is_terminated(self) -> bool:
        return self._inner.is_terminated()

    def rollback(self, steps: int) -> None:
        oldest = earliest(self._last, steps)
        self._inner.rollback(steps)
        if oldest is None:
            return
        self._last = oldest.before
        if oldest.place is not None:
            self._tracker.restore(oldest.place)
            self._lost = False
        self._known = self._mask = None

    def copy(self) -> StringMatcher:
        twin = StringMatcher(self._inner.copy(), self._tracker.copy(), self._lengths)
        twin._last, twin._lost, twin._known, twin._mask = self._last, self._lost, self._known, self._mask
        return twin
