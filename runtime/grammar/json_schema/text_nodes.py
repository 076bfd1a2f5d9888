"""JSON's strings and numbers as trees of languages: what they look like in a document.

Each character of a string has one spelling, that of a short escape where it needs one; characters that have
none are not held. It knows values, not schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from fractions import Fraction

from runtime.grammar.charset import EVERYTHING, SURROGATES, Ranges, complement, difference, points, union
from runtime.grammar.json_schema.ecma import UNSPELLED
from runtime.grammar.regex_syntax import EMPTY, Alt, At, Chars, Node, Repeat, Seq, parse, repeat
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

_ESCAPED = {ord(char): ord(letter) for char, letter in zip('"\\\b\f\n\r\t', '"\\bfnrt', strict=True)}
_PLAIN: Ranges = difference(complement(union(points(_ESCAPED), UNSPELLED)), SURROGATES)
_RUST_POINT = re.compile(r"\\x\{([0-9A-Fa-f]+)\}")
NOTHING = Alt(())
DIGIT = Chars(((48, 57),))
_DIGITS = Repeat(DIGIT, 0, None)


def text(value: str) -> Node:
    """Exactly this text, as it stands in a document."""
    return Seq(tuple(Chars(((ord(char), ord(char)),)) for char in value))


def character(ranges: Ranges) -> Node:
    """One character of `ranges` inside of a string."""
    plain = difference(ranges, complement(_PLAIN))
    options: list[Node] = [Chars(plain)] if plain else []
    letters = [letter for point, letter in _ESCAPED.items() if any(a <= point <= b for a, b in ranges)]
    if letters:
        options.append(Seq((text("\\"), Chars(points(letters)))))
    return options[0] if len(options) == 1 else Alt(tuple(options))


ANY_CHARACTER = character(EVERYTHING)
ANY_CHARACTERS = Repeat(ANY_CHARACTER, 0, None)


def quoted(inside: Node) -> Node:
    return Seq((text('"'), inside, text('"')))


def literal(value: str) -> Node:
    """The string `value` without its quotes."""
    return Seq(tuple(character(((ord(char), ord(char)),)) for char in value))


def other_than(names: Iterable[str]) -> Node:
    """The inside of any string that is none of `names`."""
    kept = sorted(set(names))
    firsts = sorted({name[0] for name in kept if name})
    options: list[Node] = [] if "" in kept else [EMPTY]
    options.append(Seq((character(complement(points(map(ord, firsts)))), ANY_CHARACTERS)))
    for first in firsts:
        rest = [name[1:] for name in kept if name[:1] == first]
        options.append(Seq((literal(first), other_than(rest))))
    return Alt(tuple(options))


def found_by(pattern: str) -> Node:
    """The texts in which `pattern`, in the syntax of lowered schemas, is found: characters as themselves.
    Raises UnsupportedConstraint where a condition stands inside of it."""
    python = _RUST_POINT.sub(lambda found: f"\\U{int(found[1], 16):08X}", pattern)
    try:
        tree = parse(python, anchored=False)
    except BadConstraint as error:
        raise UnsupportedConstraint(error.message) from None
    return _searched(tree)


_ANYTHING = Repeat(Chars(EVERYTHING), 0, None)
_BEGINS, _ENDS = {"begin"}, {"end", "end_string"}


def _searched(node: Node) -> Node:
    """`node` found anywhere, its outer anchors resolved."""
    match node:
        case Alt(options):
            return Alt(tuple(_searched(option) for option in options))
        case Seq(items) if len(items) == 1:
            return _searched(items[0])
        case Seq(items) if items and isinstance(items[0], Alt) and _conditional(items[0]):
            rest = items[1:]
            return Alt(tuple(_searched(_sequence(option, rest)) for option in items[0].options))
        case Seq(items) if items and isinstance(items[-1], Alt) and _conditional(items[-1]):
            before = Seq(items[:-1])
            return Alt(tuple(_searched(_sequence(before, (option,))) for option in items[-1].options))
        case Seq(items):
            parts = list(items)
        case _:
            parts = [node]
    while len(parts) > 1 and isinstance(parts[0], Seq):
        parts[:1] = parts[0].items
    while len(parts) > 1 and isinstance(parts[-1], Seq):
        parts[-1:] = parts[-1].items
    first, last = _ANYTHING, _ANYTHING
    while parts and isinstance(parts[0], At) and parts[0].kind in _BEGINS:
        del parts[0]
        first = EMPTY  # type: ignore[assignment]
    while parts and isinstance(parts[-1], At) and parts[-1].kind in _ENDS:
        del parts[-1]
        last = EMPTY  # type: ignore[assignment]
    if any(map(_conditional, parts)):
        raise UnsupportedConstraint("has a condition inside")
    return Seq((first, *parts, last))


def _sequence(first: Node, rest: tuple[Node, ...]) -> Node:
    return Seq((*first.items, *rest) if isinstance(first, Seq) else (first, *rest))


def _conditional(node: Node) -> bool:
    match node:
        case At():
            return True
        case Chars():
            return False
        case Repeat(item):
            return _conditional(item)
        case Seq(parts) | Alt(parts):
            return any(map(_conditional, parts))


def lengths(node: Node) -> tuple[int, int | None]:
    """The fewest and the most characters of a text of `node`; None: no bound."""
    match node:
        case Chars():
            return 1, 1
        case At():
            return 0, 0
        case Seq(parts):
            found = [lengths(part) for part in parts]
            most = [high for _, high in found]
            return sum(low for low, _ in found), None if None in most else sum(h for h in most if h)
        case Alt(options):
            found = [lengths(option) for option in options] or [(0, 0)]
            most = [high for _, high in found]
            return min(low for low, _ in found), None if None in most else max(h or 0 for h in most)
        case Repeat(item, low, high):
            least, longest = lengths(item)
            if high is None or longest is None:
                return least * low, 0 if longest == 0 else None
            return least * low, longest * high


def in_string(node: Node) -> Node:
    """A language of texts as it stands inside of a JSON string."""
    match node:
        case Chars(ranges):
            return ANY_CHARACTER if ranges == EVERYTHING else character(ranges)
        case Seq(parts):
            return Seq(tuple(map(in_string, parts)))
        case Alt(options):
            return Alt(tuple(map(in_string, options)))
        case Repeat(item, low, high):
            return repeat(in_string(item), low, high)
        case At():
            raise AssertionError("conditions were resolved")


INTEGER = Seq((Repeat(text("-"), 0, 1), Alt((text("0"), Seq((Chars(((49, 57),)), _DIGITS))))))
FRACTION = Seq((text("."), Repeat(DIGIT, 1, None)))
_EXPONENT = Seq(
    (Chars(points(map(ord, "eE"))), Repeat(Chars(points(map(ord, "+-"))), 0, 1), Repeat(DIGIT, 1, None))
)
NUMBER = Seq((INTEGER, Repeat(FRACTION, 0, 1), Repeat(_EXPONENT, 0, 1)))


def integers(low: int | None, high: int | None) -> Node:
    """The integers low .. high, both included; None: no bound."""
    options: list[Node] = []
    if high is None or high >= 0:
        options.append(magnitudes(max(low or 0, 0), high))
    if low is None or low <= 0:  # -0 is 0
        options.append(Seq((text("-"), magnitudes(max(-(high or 0), 0), None if low is None else -low))))
    return Alt(tuple(options))


def magnitudes(low: int, high: int | None) -> Node:
    """The whole numbers low .. high without a sign or leading zeros."""
    if high is not None and high < low:
        return NOTHING
    if high is None:
        width = len(str(low))
        more = Seq((Chars(((49, 57),)), Repeat(DIGIT, width, None)))
        return Alt((_same_width(str(low), "9" * width), more))
    options: list[Node] = []
    while low <= high:
        last = min(high, int("9" * len(str(low))))
        options.append(_same_width(str(low), str(last)))
        low = last + 1
    return Alt(tuple(options))


def _same_width(low: str, high: str) -> Node:
    """The numbers low .. high, all of so many digits."""
    if not low:
        return EMPTY
    rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(low):
        return Repeat(DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return Seq((text(low[0]), _same_width(low[1:], high[1:])))
    options: list[Node] = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        options.append(Seq((text(low[0]), _same_width(low[1:], "9" * rest))))
        first += 1
    if high[1:] != "9" * rest:
        options.append(Seq((text(high[0]), _same_width("0" * rest, high[1:]))))
        last -= 1
    if first <= last:
        options.append(Seq((Chars(((48 + first, 48 + last),)), Repeat(DIGIT, rest, rest))))
    return Alt(tuple(options))


_ZEROS = Repeat(Seq((text("."), Repeat(text("0"), 1, None))), 0, 1)
_SOME = Seq((text("."), Repeat(text("0"), 0, None), Chars(((49, 57),)), _DIGITS))


def decimals(low: int | None, high: int | None, above: bool, below: bool) -> Node:
    """The numbers low .. high (above, below: without the end itself) as decimals without an exponent."""
    options = [_decimal_magnitudes(low, high, above, below)]
    options.append(Seq((text("-"), _decimal_magnitudes(_negated(high), _negated(low), below, above))))
    return Alt(tuple(options))


def _negated(value: int | None) -> int | None:
    return None if value is None else -value


def _decimal_magnitudes(low: int | None, high: int | None, above: bool, below: bool) -> Node:
    if low is None or low < 0:
        low, above = 0, False
    if high is not None and (high < low or (high == low and (above or below))):
        return NOTHING
    options: list[Node] = []
    if high is None:
        inner = magnitudes(low + 1, None)
    else:
        inner = magnitudes(low + 1, high - 1)
        if not below:
            options.append(Seq((text(str(high)), _ZEROS)))
    options.append(Seq((inner, Repeat(FRACTION, 0, 1))))
    if high is None or low < high:
        options.append(Seq((text(str(low)), _SOME if above else Repeat(FRACTION, 0, 1))))
    return Alt(tuple(options))


def whole(value: float | int) -> int | None:
    """`value` as an int where it is one."""
    fraction = Fraction(value)
    return int(fraction) if fraction.denominator == 1 else None


def dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
