"""The values of schemas that take few: what is left for the items of an array that must all differ.

Of a schema it reads what lists values (enum, const, boolean, null, small ranges of integers, the empty
string, array and object), through references and combinations. The answer never misses a value; whether each
of them is one is for a validator to say. It knows no engine.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from runtime.grammar.json_schema.refs import Place, SchemaDocument
from runtime.grammar.json_schema.shapes import known

Values = frozenset[str]
"""Values as canonical() writes them."""

MOST = 1000
"""Values that are listed, at most."""


def canonical(value: object) -> str:
    """The same text for values that JSON Schema calls equal."""
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


def few(
    document: SchemaDocument, place: Place, node: Any, through: frozenset[Place] = frozenset()
) -> Values | None:
    """The values that the schema `node` at `place` may take; None where they are not few."""
    if node is False:
        return frozenset()
    if not isinstance(node, Mapping) or place in through or len(through) > 20:
        return None
    through |= {place}
    found = [values for values in _of_references(document, place, node, through) if values is not None]
    if not document.alone(node):
        found += _of_keywords(document, place, node, through)
    return frozenset.intersection(*found) if found else None


def few_items(document: SchemaDocument, place: Place, node: Mapping[str, Any]) -> Values | None:
    """The values that any item of an array under `node` may take, by the keywords of that object alone."""
    listed = isinstance(node.get("items"), list)
    first = "items" if listed else "prefixItems" if known("prefixItems", document.draft) else ""
    rest = "additionalItems" if listed else "items"
    if rest not in node:
        return None
    found = few(document, (*place, rest), node[rest])
    for number, inner in enumerate(node.get(first, ()) if first else ()):
        values = few(document, (*place, first, number), inner)
        if found is None or values is None:
            return None
        found |= values
    return found


def can_differ(choices: Sequence[Values | None]) -> bool:
    """Whether each place can have a value of its own; None: a place that can have any number of them."""
    bounded = [values for values in choices if values is not None]
    if any(not values for values in bounded):
        return False
    if len(set(bounded)) <= 1:
        return not bounded or len(bounded[0]) >= len(bounded)
    holder: dict[str, int] = {}
    # A system of distinct representatives, by augmenting paths (Hall 1935; Kuhn 1955).
    return all(_seat(number, bounded, holder, set()) for number in range(len(bounded)))


class ItemChoices:
    """What is left for the items of an array that must differ. few_at(index): the values of the item there,
    None where they are not few; from index `numbered` on it is always the same. least: items there must be.
    one_spelling: values are spelled as masks spell them, and in no other way."""

    def __init__(
        self, few_at: Callable[[int], Values | None], numbered: int, least: int, *, one_spelling: bool
    ) -> None:
        self._few_at, self._numbered, self._least = few_at, numbered, least
        self._one_spelling = one_spelling
        self._known: dict[int, Values | None] = {}
        self._left: dict[tuple[frozenset[str], int], Spellings] = {}
        found = [self.at(index) for index in range(numbered + 1)]
        self.limited = any(values is not None for values in found)
        """Whether some item has few values to choose from."""
        self.listed: Values = frozenset().union(*(values for values in found if values is not None))
        """All the values that are listed."""

    def at(self, index: int) -> Values | None:
        index = min(index, self._numbered)
        if index not in self._known:
            self._known[index] = self._few_at(index)
        return self._known[index]

    def tell(self, index: int) -> bool:
        """Whether the item at `index` is one of few."""
        return self.limited and self.at(index) is not None

    def room(self, taken: frozenset[str], number: int, least: int = 0) -> bool:
        """Whether items that differ from each other and from `taken` can come from index `number` on until
        there are as many as must be, and `least`."""
        if not self.limited:
            return True
        ends = min(max(self._least, least), number + _MOST_ITEMS)
        choices = [self.at(index) for index in range(number, ends)]
        return can_differ([None if values is None else values - taken for values in choices])

    def fits(self, taken: frozenset[str], number: int, begun: bytes) -> bool:
        """Whether the item at index `number`, none of `taken`, may begin as `begun`. True where that cannot
        be told."""
        if not self._one_spelling or not self.tell(number):
            return True
        key = (taken, number)
        if key not in self._left:
            if len(self._left) >= _KEPT:
                self._left.clear()
            values = (self.at(number) or frozenset()) - taken
            if self._least > number + 1:
                values = frozenset(one for one in values if self.room(taken | {one}, number + 1))
            self._left[key] = Spellings(values)
        return self._left[key].begin(begun)


ANY_ITEMS = ItemChoices(lambda _: None, 0, 0, one_spelling=False)
"""Of arrays whose items may be equal."""

_MOST_ITEMS = 256
"""Items that are looked at ahead, whether there are values left for them."""
_KEPT = 256


class Spellings:
    """The texts of some values, as masks offer them: strings with few escapes, numbers without exponents."""

    def __init__(self, values: Iterable[str]) -> None:
        parsed = [json.loads(text) for text in values]
        self._strings = [value for value in parsed if isinstance(value, str)]
        self._words = [json.dumps(value) for value in parsed if value is None or isinstance(value, bool)]
        numbers = [
            value for value in parsed if isinstance(value, (int, float)) and not isinstance(value, bool)
        ]
        for value in numbers:
            self._words += [f"{value}", f"{value}.0"] if value else ["0.0", "-0.0"]
        self._unsure = any("e" in word and word[0] not in "tf" for word in self._words)

    def begin(self, text: bytes) -> bool:
        """Whether some string, number or word begins with `text`; True for the begin of anything else."""
        if text[:1] in b"[{":
            return True
        if text[:1] != b'"':
            said = text.decode("ascii", "replace")
            return self._unsure or any(word.startswith(said) for word in self._words)
        begun = _WHOLE.match(text, 1)[0]  # type: ignore[index]  # it matches nothing, too
        rest = text[1 + len(begun) :]  # of an escape
        if b"\\" not in begun and not rest:
            return any(value.encode().startswith(begun) for value in self._strings)
        said = json.loads(b'"' + _utf8(begun) + b'"', strict=False)
        after = [value[len(said) :] for value in self._strings if value.startswith(said)]
        return any(not rest or len(rest) > 1 or end[:1] in _ESCAPED for end in after if end or not rest)


_WHOLE = re.compile(rb"(?:[^\\]|\\u[0-9a-fA-F]{4}|\\[^u])*+", re.DOTALL)
"""The begin of a string without the escape that it may end in."""


_ESCAPED = frozenset('"\\\b\f\n\r\t')


def _utf8(data: bytes) -> bytes:
    """`data` without the character that it may end in the middle of."""
    return data.decode("utf-8", "ignore").encode()


def _seat(number: int, choices: Sequence[Values], holder: dict[str, int], tried: set[str]) -> bool:
    for value in choices[number]:
        if value in tried:
            continue
        tried.add(value)
        if value not in holder or _seat(holder[value], choices, holder, tried):
            holder[value] = number
            return True
    return False


def _of_references(
    document: SchemaDocument, place: Place, node: Mapping[str, Any], through: frozenset[Place]
) -> list[Values | None]:
    found = []
    for word in ("$ref", "$dynamicRef", "$recursiveRef"):
        reference = node.get(word)
        if not isinstance(reference, str) or (document.scoped and word != "$ref"):
            continue
        target = document.resolve(reference, document.base_at(place))
        if target is not None:
            found.append(few(document, target.place, target.node, through))
    return found


def _of_keywords(
    document: SchemaDocument, place: Place, node: Mapping[str, Any], through: frozenset[Place]
) -> list[Values]:
    found: list[Values] = []
    if "const" in node and known("const", document.draft):
        found.append(frozenset({canonical(node["const"])}))
    listed = node.get("enum")
    if isinstance(listed, list) and len(listed) <= MOST:
        found.append(frozenset(map(canonical, listed)))
    typed = _of_types(node)
    if typed is not None:
        found.append(typed)
    for word in ("allOf", "anyOf", "oneOf"):
        branches = node.get(word)
        if not isinstance(branches, list) or not branches:
            continue
        parts = [few(document, (*place, word, n), inner, through) for n, inner in enumerate(branches)]
        if word == "allOf":
            found += [part for part in parts if part is not None]
        elif None not in parts:
            found.append(frozenset().union(*(part for part in parts if part is not None)))
    return [values for values in found if len(values) <= MOST]


def _of_types(node: Mapping[str, Any]) -> Values | None:
    names = node.get("type")
    found: set[str] = set()
    for name in [names] if isinstance(names, str) else names if isinstance(names, list) else [None]:
        values = _of_type(name, node)
        if values is None:
            return None
        found |= values
    return frozenset(found)


_NONE_ABOVE = {"string": ("maxLength", '""'), "array": ("maxItems", "[]"), "object": ("maxProperties", "{}")}


def _of_type(name: Any, node: Mapping[str, Any]) -> set[str] | None:
    match name:
        case "null":
            return {"null"}
        case "boolean":
            return {"true", "false"}
        case "integer":
            return _integers(node)
        case "string" | "array" | "object":
            word, empty = _NONE_ABOVE[name]
            return {empty} if node.get(word) == 0 else None
        case _:
            return None


def _integers(node: Mapping[str, Any]) -> set[str] | None:
    low = _first(1, node.get("minimum"), node.get("exclusiveMinimum"))
    high = _first(-1, node.get("maximum"), node.get("exclusiveMaximum"))
    if low is None or high is None:
        return None
    return None if high - low >= MOST else {str(number) for number in range(low, high + 1)}


def _first(way: int, limit: Any, exclusive: Any) -> int | None:
    """The integer that is nearest to a limit, going up (1) or down (-1) from it; None where there is none. In
    draft 4 `exclusive` is a word about the limit, which may then be one too wide here."""
    found = []
    for value, beyond in ((limit, False), (exclusive, True)):
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**53:
            nearest = way * math.ceil(way * value)
            found.append(nearest + way if beyond and nearest == value else nearest)
    return way * max(way * number for number in found) if found else None
