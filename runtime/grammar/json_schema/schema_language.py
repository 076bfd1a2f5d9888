"""SchemaLanguage: the documents of a schema as one regular language, or as a wider one and what is then left.

Works on a lowered schema (see lower.py): each keyword is held, or left to the validator by name and place, or
the schema is refused. Where no regular language can hold all documents, the result offers fewer and says so
in `narrowed`: JSON of any depth ends at a fixed one, and properties that a schema allows without saying
anything of them are not offered. Properties come in the order of the schema, those that are not required may
be missing. It knows no bytes and no automata.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from runtime.grammar.json_schema import text_nodes as json_text
from runtime.grammar.json_schema.disjunction import Alternatives, Plain, both, types_of
from runtime.grammar.json_schema.ecma import spellable
from runtime.grammar.json_schema.lower import Plan
from runtime.grammar.json_schema.refs import IN_PLACE, KIND, Place, show
from runtime.grammar.json_schema.source import WHITESPACE
from runtime.grammar.json_schema.widen import Lowered
from runtime.grammar.regex_syntax import EMPTY, Alt, Chars, Node, Repeat, Seq, parse, repeat
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

ORDER = "properties in another order than the schema's"
"""What is not offered where an object has several properties."""

ANY_DEPTH = 1
"""Levels of arrays and objects of which a schema says nothing."""

_SOURCES = {"pattern": ("pattern", "format"), "maxLength": ("maxLength", "format"), "enum": ("enum", "const")}
"""Word of a lowered schema -> the keywords it may stand for."""

_MOST_PARTS = 5_000
_MOST_SIZE = 40_000
_LARGEST = 10**18


class Member(NamedTuple):
    """A property: its name as a language, its value, whether it must be there."""

    name: Node
    value: Node
    required: bool


class SchemaLanguage:
    """`node`: the language; `plan` is the given one, its checks completed. Raises UnsupportedConstraint or
    BadConstraint."""

    def __init__(self, plan: Plan, whitespace: str) -> None:
        self._plan = plan
        pattern = WHITESPACE[whitespace]
        self._space: Node = EMPTY if pattern is None else repeat(parse(pattern), 0, 1)
        self._alternatives = Alternatives(plan, self._check)
        self._narrowed: dict[str, None] = {}
        self._parts = 0
        self._by_type: dict[str, Callable[[Plain], Node]] = {
            "object": self._object, "array": self._array, "string": self._string, "integer": self._integer,
            "number": self._number, "boolean": self._boolean, "null": self._null,
        }  # fmt: skip
        self._any: list[Node] = []
        try:
            self.node = self._value(plan.schema or True, (), True, frozenset())
            size = _size(self.node, {})
        except RecursionError:
            raise BadConstraint("is nested too deeply", where=KIND) from None
        if size > _MOST_SIZE:
            raise UnsupportedConstraint(f"comes to a language of {size} parts", where=KIND)

    @property
    def narrowed(self) -> tuple[str, ...]:
        return tuple(self._narrowed)

    def _check(self, place: Place, word: str) -> None:
        """Leave `word` of a lowered schema to the validator: the keywords it comes from. Where it may come
        from another schema that was joined to the one at `place`, all of that one is validated."""
        node: Any = self._plan.document.root
        for step in place:
            node = node[step]
        words = [one for one in _SOURCES.get(word, (word,)) if one in node] if isinstance(node, dict) else []
        if not words or any(other in node for other in IN_PLACE if other != word):
            words = [f"{word} of what is joined here"]
        kept = self._plan.checks.setdefault(place, [])
        kept.extend(one for one in words if one not in kept)

    def _value(self, schema: Lowered, place: Place, known: bool, through: frozenset[str]) -> Node:
        self._parts += 1
        if self._parts > _MOST_PARTS:
            raise UnsupportedConstraint(
                f"comes to more than {_MOST_PARTS} parts with its references written out", where=KIND
            )
        if schema is True:
            return self._anything(place)
        found = self._alternatives.of(schema, place, known, through)
        return _either([self._plain(plain) for plain in found])

    def _plain(self, plain: Plain) -> Node:
        if not plain.words:
            return self._anything(plain.place)
        if "enum" in plain.words:
            return self._enum(plain)
        kinds = types_of(plain.words)
        return _either([self._by_type[kind](plain) for kind in kinds])

    def _narrow(self, what: str, place: Place) -> None:
        self._narrowed[f"{what} at {show(place)}"] = None

    # -- values of which nothing is said

    def _anything(self, place: Place) -> Node:
        self._narrow(f"values deeper than {ANY_DEPTH} levels", place)
        return self._any_value(ANY_DEPTH)

    def _any_value(self, depth: int) -> Node:
        while len(self._any) <= depth:
            string = json_text.quoted(json_text.ANY_CHARACTERS)
            scalars = [string, json_text.NUMBER, self._boolean(None), self._null(None)]
            if not self._any:
                empty = [self._enclosed("[]", EMPTY), self._enclosed("{}", EMPTY)]
                self._any.append(Alt((*scalars, *empty)))
                continue
            inner = self._any[-1]
            member = self._member(json_text.ANY_CHARACTERS, inner)
            self._any.append(
                Alt((*scalars, self._list("[]", inner, 0, None), self._list("{}", member, 0, None)))
            )
        self._parts += 4**depth
        return self._any[depth]

    # -- scalars

    def _boolean(self, _: Plain | None) -> Node:
        return Alt((json_text.text("true"), json_text.text("false")))

    def _null(self, _: Plain | None) -> Node:
        return json_text.text("null")

    def _string(self, plain: Plain) -> Node:
        words = plain.words
        low, high = words.get("minLength", 0), words.get("maxLength")
        if high is not None and high < low:
            return json_text.NOTHING
        if "pattern" not in words:
            return json_text.quoted(repeat(json_text.ANY_CHARACTER, low, high))
        try:
            found = json_text.found_by(words["pattern"])
        except UnsupportedConstraint:
            self._check(plain.place, "pattern")
            return json_text.quoted(repeat(json_text.ANY_CHARACTER, low, high))
        shortest, longest = json_text.lengths(found)
        if (low, high) != (0, None):
            bounded = _with_lengths(found, low, high)
            if bounded is not None:
                found = bounded
            elif shortest < low or (high is not None and (longest is None or longest > high)):
                self._check(plain.place, "minLength" if shortest < low else "maxLength")
        return json_text.quoted(json_text.in_string(found))

    def _integer(self, plain: Plain) -> Node:
        self._divisor(plain)
        low, high = self._bounds(plain.words)
        return json_text.INTEGER if low is None and high is None else json_text.integers(low, high)

    @staticmethod
    def _bounds(words: Mapping[str, Any]) -> tuple[int | None, int | None]:
        """The least and the largest integer within the bounds."""
        lows: list[int] = []
        highs: list[int] = []
        for word, exclusive in (("minimum", False), ("exclusiveMinimum", True)):
            if word in words:
                value = words[word]
                lows.append(int(value // 1) + 1 if exclusive or value % 1 else int(value))
        for word, exclusive in (("maximum", False), ("exclusiveMaximum", True)):
            if word in words:
                value = words[word]
                highs.append(int(-(-value // 1)) - 1 if exclusive or value % 1 else int(value))
        return max(lows, default=None), min(highs, default=None)

    def _number(self, plain: Plain) -> Node:
        self._divisor(plain)
        words = plain.words
        lows = [(words[word], word != "minimum") for word in ("minimum", "exclusiveMinimum") if word in words]
        highs = [
            (words[word], word == "maximum") for word in ("maximum", "exclusiveMaximum") if word in words
        ]
        if not lows and not highs:
            return json_text.NUMBER
        low, above = max(lows, default=(None, False))
        high, below = min(highs, default=(None, True))
        ends = [json_text.whole(value) for value in (low, high) if value is not None]
        if None in ends or any(abs(end) > _LARGEST for end in ends if end is not None):
            for word in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
                if word in words:
                    self._check(plain.place, word)
            return json_text.NUMBER
        self._narrow("bounded numbers with an exponent", plain.place)
        return json_text.decimals(
            None if low is None else int(low), None if high is None else int(high), above, not below
        )

    def _divisor(self, plain: Plain) -> None:
        divisor = plain.words.get("multipleOf")
        if divisor is not None and not (divisor == 1 and types_of(plain.words) == ["integer"]):
            self._check(plain.place, "multipleOf")

    def _enum(self, plain: Plain) -> Node:
        words = plain.words
        kinds = set(types_of(words))
        options = [value for value in words["enum"] if _is_of(value, kinds)]
        for word in sorted(words.keys() - {"enum", "type"}):
            self._check(plain.place, word)  # what else is said of the values that are listed
        self._parts += len(options)
        return _either([self._constant(value) for value in options])

    def _constant(self, value: Any) -> Node:
        match value:
            case str():
                return json_text.quoted(json_text.literal(value))
            case list():
                return self._enclosed("[]", self._sequence([self._constant(item) for item in value]))
            case dict():
                members = [
                    self._member(json_text.literal(name), self._constant(inner))
                    for name, inner in value.items()
                ]
                return self._enclosed("{}", self._sequence(members))
            case _:
                return json_text.text(json_text.dumped(value))

    # -- arrays

    def _array(self, plain: Plain) -> Node:
        words = plain.words
        low, high = words.get("minItems", 0), words.get("maxItems")
        first = [
            self._below(plain, inner, "prefixItems", number)
            for number, inner in enumerate(words.get("prefixItems", [])[:high])
        ]
        rest_schema = words.get("items", True)
        possible = next((n for n, item in enumerate(first) if item == json_text.NOTHING), len(first))
        if possible < len(first):
            first, rest_schema = first[:possible], False
        if rest_schema is False:
            high = len(first) if high is None else min(high, len(first))
        if high is not None and high < low:
            return json_text.NOTHING
        rest: Node = EMPTY
        if high is None or high > len(first):
            rest = self._below(plain, rest_schema, "items")
            if rest == json_text.NOTHING:
                high, rest = len(first), EMPTY
                if high < low:
                    return json_text.NOTHING
        return self._items(first, rest, low, high)

    def _items(self, first: list[Node], rest: Node, low: int, high: int | None) -> Node:
        """An array of `first` one after the other, then `rest`, low .. high items in all."""
        if not first:
            return self._list("[]", rest, low, high)
        more = high is None or high > len(first)
        tail: Node = EMPTY
        if more:
            least = max(low - len(first), 0)
            tail = repeat(
                Seq((self._comma(), rest, self._space)), least, None if high is None else high - len(first)
            )
        for number in range(len(first) - 1, 0, -1):
            tail = Seq((self._comma(), first[number], self._space, tail))
            if number >= low:
                tail = repeat(tail, 0, 1)
        inside: Node = Seq((first[0], self._space, tail))
        return self._enclosed("[]", inside if low > 0 else repeat(inside, 0, 1))

    def _list(self, ends: str, item: Node, low: int, high: int | None) -> Node:
        if high == 0:
            return self._enclosed(ends, EMPTY)
        more = repeat(
            Seq((self._comma(), item, self._space)), max(low - 1, 0), None if high is None else high - 1
        )
        inside: Node = Seq((item, self._space, more))
        return self._enclosed(ends, inside if low > 0 else repeat(inside, 0, 1))

    def _comma(self) -> Node:
        return Seq((json_text.text(","), self._space))

    def _enclosed(self, ends: str, inside: Node) -> Node:
        return Seq((json_text.text(ends[0]), self._space, inside, json_text.text(ends[1])))

    def _sequence(self, items: Sequence[Node]) -> Node:
        parts: list[Node] = []
        for number, item in enumerate(items):
            parts += ([self._comma()] if number else []) + [item, self._space]
        return Seq(tuple(parts))

    def _below(self, plain: Plain, schema: Lowered, *steps: str | int) -> Node:
        if schema is False:
            return json_text.NOTHING
        place = (*plain.place, *steps)
        known = plain.known and self._alternatives.exists(place)  # not what was said in other words
        return self._value(schema, place if known else plain.place, known, plain.through)

    # -- objects

    def _member(self, name: Node, value: Node) -> Node:
        return Seq((json_text.quoted(name), self._space, json_text.text(":"), self._space, value))

    def _object(self, plain: Plain) -> Node:
        words, place = plain.words, plain.place
        named: Mapping[str, Lowered] = words.get("properties", {})
        required: list[str] = list(words.get("required", ()))
        rest: Lowered = words.get("additionalProperties", True)
        patterns: Mapping[str, Lowered] = words.get("patternProperties", {})
        members: list[Member] = []
        for name, inner in named.items():
            value = self._below(plain, inner, "properties", name)
            if value == json_text.NOTHING:
                if name in required:
                    return json_text.NOTHING
                continue
            members.append(Member(json_text.literal(name), value, name in required))
        for name in required:
            if name not in named:
                value = self._unnamed(plain, name, patterns, rest)
                if value == json_text.NOTHING:
                    return value
                members.append(Member(json_text.literal(name), value, True))
        others = self._others(plain, {*named, *required}, patterns, rest)
        if len(members) > 1 or (members and others is not None):
            self._narrowed[ORDER] = None
        low, high = words.get("minProperties", 0), words.get("maxProperties")
        if not members:
            if high is not None and high < low:
                return json_text.NOTHING
            if others is None:
                return json_text.NOTHING if low else self._enclosed("{}", EMPTY)
            if low > 1:
                self._check(place, "minProperties")  # a name may be there twice
            return self._list("{}", others, low, high)
        if low > sum(member.required for member in members):
            self._check(place, "minProperties")
        if high is not None and (others is not None or high < len(members)):
            self._check(place, "maxProperties")
        return self._enclosed("{}", self._members(members, others, low))

    def _unnamed(self, plain: Plain, name: str, patterns: Mapping[str, Lowered], rest: Lowered) -> Node:
        """The value of a property that is required but not named."""
        schema: Lowered = True
        matched = False
        for pattern, inner in patterns.items():
            if _finds(pattern, name):
                schema, matched = both(schema, inner), True
        if not matched:
            return self._below(plain, rest, "additionalProperties")
        return self._value(schema, plain.place, False, plain.through) if schema else json_text.NOTHING

    def _others(
        self, plain: Plain, names: set[str], patterns: Mapping[str, Lowered], rest: Lowered
    ) -> Node | None:
        """A property that is not named, None where there is none."""
        options: list[Node] = []
        for pattern, inner in patterns.items():
            value = self._below(plain, inner, "patternProperties", pattern)
            if value == json_text.NOTHING:
                continue
            try:
                found = json_text.found_by(pattern)
            except UnsupportedConstraint as error:
                where = f"{KIND} {show(plain.place)}/patternProperties"
                raise UnsupportedConstraint(f"{pattern!r} {error.message}", where=where) from None
            options.append(self._member(json_text.in_string(found), value))
        if patterns and (names or len(patterns) > 1):
            self._check(plain.place, "patternProperties")
        if any(_finds(pattern, name) for pattern in patterns for name in names):
            self._check(plain.place, "properties")  # one that is named may come as one of a pattern
        if patterns and rest is not False:
            if rest is not True:
                self._check(plain.place, "additionalProperties")
            self._narrow("properties that no pattern names", plain.place)
        elif rest is True and names:
            self._narrow("properties that it does not name", plain.place)
        elif rest is not False:
            value = self._below(plain, rest, "additionalProperties")
            if value != json_text.NOTHING:
                name = json_text.other_than(filter(spellable, names)) if names else json_text.ANY_CHARACTERS
                options.append(self._member(name, value))
        return _either(options) if options else None

    def _members(self, members: list[Member], others: Node | None, low: int) -> Node:
        """The inside of an object: its members in order, those not required present or not."""
        items = [self._member(member.name, member.value) for member in members]
        more: Node = EMPTY if others is None else repeat(Seq((self._comma(), others, self._space)), 0, None)
        anchor = next((n for n, member in enumerate(members) if member.required), None)
        if anchor is not None:
            before = [repeat(Seq((item, self._space, self._comma())), 0, 1) for item in items[:anchor]]
            return Seq((*before, items[anchor], self._space, *self._after(items, members, anchor + 1), more))
        options: list[Node] = [] if low else [EMPTY]
        for number, item in enumerate(items):
            self._parts += len(items) - number
            options.append(Seq((item, self._space, *self._after(items, members, number + 1), more)))
        if others is not None:
            options.append(Seq((others, self._space, more)))
        return Alt(tuple(options))

    def _after(self, items: list[Node], members: list[Member], start: int) -> list[Node]:
        out: list[Node] = []
        for item, member in zip(items[start:], members[start:], strict=True):
            out.append(repeat(Seq((self._comma(), item, self._space)), int(member.required), 1))
        return out


def _finds(pattern: str, text: str) -> bool:
    """Whether an expression in the engine's spelling is found in `text`."""
    python = re.sub(r"\\x\{([0-9A-Fa-f]+)\}", lambda found: f"\\U{int(found[1], 16):08X}", pattern)
    return re.search(python, text) is not None


def _either(options: list[Node]) -> Node:
    kept = [option for option in options if option != json_text.NOTHING]
    return kept[0] if len(kept) == 1 else Alt(tuple(kept))


def _size(node: Node, known: dict[int, int]) -> int:
    """Parts of a tree with what it shares written out; `known`: of the parts met already, by id."""
    found = known.get(id(node))
    if found is None:
        match node:
            case Seq(parts) | Alt(parts):
                found = 1 + sum(_size(part, known) for part in parts)
            case Repeat(item):
                found = 1 + _size(item, known)
            case _:
                found = 1
        known[id(node)] = found
    return found


def _with_lengths(node: Node, low: int, high: int | None) -> Node | None:
    """`node` with so many characters only; None where that is more than one count."""
    match node:
        case Seq(items) if len([item for item in items if item != EMPTY]) == 1:
            (only,) = (item for item in items if item != EMPTY)
            return _with_lengths(only, low, high)
        case Repeat(Chars() as chars, least, most):
            least = max(least, low)
            most = high if most is None else most if high is None else min(most, high)
            return json_text.NOTHING if most is not None and most < least else repeat(chars, least, most)
        case _:
            return None


def _is_of(value: Any, kinds: set[str]) -> bool:
    match value:
        case bool():
            return "boolean" in kinds
        case None:
            return "null" in kinds
        case int():
            return bool({"integer", "number"} & kinds)
        case float():
            return "number" in kinds or ("integer" in kinds and value.is_integer())
        case str():
            return "string" in kinds
        case list():
            return "array" in kinds
        case _:
            return "object" in kinds
