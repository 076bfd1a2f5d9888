"""Trees of languages, and Python regular expressions read into them and spelled for Rust's regex crates.

`re`'s own parser reads a pattern, so precedence, flags, escapes and errors are Python's. What is not a
regular language (look-around, back references, atomic groups) is refused with its offset.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Literal

from runtime.grammar.automata.charset import (
    EVERYTHING,
    SURROGATES,
    Ranges,
    category,
    complement,
    difference,
    ignoring_case,
    union,
)
from runtime.protocol.errors import BadConstraint, UnsupportedConstraint

AtKind = Literal[
    "begin", "begin_line", "end", "end_line", "end_string", "edge", "no_edge", "edge_a", "no_edge_a"
]
"""A position between two characters. edge = word boundary, `_a` = by ASCII words."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character out of a set."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Seq:
    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of the options; none at all is the empty language."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times; high None = without end."""

    item: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class At:
    """A condition on the neighbouring characters; takes none itself."""

    kind: AtKind


@dataclass(frozen=True, slots=True)
class Ref:
    """A rule of a grammar."""

    name: str


Node = Chars | Seq | Alt | Repeat | At | Ref
EMPTY = Seq(())
NOTHING = r"[^\s\S]"
"""The empty language, as a Rust pattern."""


def parts_of(node: Node) -> tuple[Node, ...]:
    match node:
        case Seq(items) | Alt(items):
            return items
        case Repeat(item):
            return (item,)
        case _:
            return ()


def nodes_of(node: Node) -> Iterator[Node]:
    """`node` and all nodes below it."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(parts_of(node)))


def has_conditions(node: Node) -> bool:
    return any(isinstance(one, At) for one in nodes_of(node))


def without_conditions(node: Node) -> Node:
    """`node` itself. Raises UnsupportedConstraint if it contains a condition on neighbouring characters."""
    for one in nodes_of(node):
        if isinstance(one, At):
            raise _unsupported_condition(one)
    return node


def _unsupported_condition(node: At) -> UnsupportedConstraint:
    return UnsupportedConstraint(
        f"a condition on neighbouring characters ({node.kind}) inside of the pattern is not kept",
        where="regex",
        hint='grammar backend "outlines" keeps it',
    )


_TYPE_FLAGS = int(re.ASCII | re.LOCALE | re.UNICODE)
_NOT_NEWLINE: Ranges = complement(((10, 10),))
_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}
_REFUSED = {
    sre.ASSERT: ("look-ahead or look-behind", r"\(\?<?[=!]"),
    sre.ASSERT_NOT: ("negative look-ahead or look-behind", r"\(\?<?!"),
    sre.GROUPREF: ("a back reference", r"\\[1-9]|\(\?P="),
    sre.GROUPREF_EXISTS: ("a conditional group", r"\(\?\("),
    sre.ATOMIC_GROUP: ("an atomic group", r"\(\?>"),
    sre.POSSESSIVE_REPEAT: ("a possessive quantifier", r"[*+?}]\+"),
}


def parse(pattern: str, *, anchored: bool = True) -> Node:
    """The language of `pattern`. `anchored`: under fullmatch, where outer `^` and `$` say nothing. Raises
    BadConstraint with the position of the mistake, or UnsupportedConstraint."""
    try:
        tree = _parser.parse(pattern)
        root = _Reader(pattern).read(tree, tree.state.flags)
    except re.error as error:
        at = f" at position {error.pos}" if error.pos is not None else ""
        raise BadConstraint(f"{error.msg}{at} of {_shown(pattern)}", where="regex") from None
    except (RecursionError, OverflowError) as error:
        reason = "groups are nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise BadConstraint(f"{reason}, in {_shown(pattern)}", where="regex") from None
    return trim_anchors(root) if anchored else root


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= 80 else pattern[:77] + "...")


class _Reader:
    """Turns `re`'s parse tree into ours, with every flag resolved."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._verbs: dict[Any, Callable[[Any, int], Node]] = {
            sre.LITERAL: lambda value, flags: self._chars([(sre.LITERAL, value)], flags),
            sre.NOT_LITERAL: lambda value, flags: self._chars(
                [(sre.NEGATE, None), (sre.LITERAL, value)], flags
            ),
            sre.IN: self._chars,
            sre.ANY: lambda _, flags: Chars(EVERYTHING if flags & re.DOTALL else _NOT_NEWLINE),
            sre.BRANCH: lambda value, flags: Alt(tuple(self.read(option, flags) for option in value[1])),
            sre.SUBPATTERN: self._group,
            sre.MAX_REPEAT: self._repeat,
            sre.MIN_REPEAT: self._repeat,  # lazy or greedy: the same language
            sre.AT: self._at,
            sre.FAILURE: lambda _, __: Alt(()),
        }

    def read(self, tree: Any, flags: int) -> Node:
        items = tuple(self._one(op, value, flags) for op, value in tree)
        return items[0] if len(items) == 1 else Seq(items)

    def _one(self, op: Any, value: Any, flags: int) -> Node:
        verb = self._verbs.get(op)
        if verb is not None:
            return verb(value, flags)
        name, spelling = _REFUSED.get(op, (str(op).lower(), ""))
        offset = _offset(self._pattern, spelling) if spelling else None
        at = f" at position {offset}" if offset is not None else ""
        raise UnsupportedConstraint(
            f"{name}{at} of {_shown(self._pattern)} is not a regular language this backend keeps exactly",
            where="regex",
            hint="rewrite the pattern without it",
        )

    def _group(self, value: Any, flags: int) -> Node:
        _, added, removed, tree = value
        if added & _TYPE_FLAGS:
            flags &= ~_TYPE_FLAGS
        return self.read(tree, (flags | added) & ~removed)

    def _repeat(self, value: Any, flags: int) -> Node:
        low, high, tree = value
        return repeat(self.read(tree, flags), int(low), None if high is sre.MAXREPEAT else int(high))

    def _at(self, code: Any, flags: int) -> Node:
        lines, ascii_only = bool(flags & re.MULTILINE), bool(flags & re.ASCII)
        kinds: dict[Any, AtKind] = {
            sre.AT_BEGINNING: "begin_line" if lines else "begin",
            sre.AT_BEGINNING_STRING: "begin",
            sre.AT_END: "end_line" if lines else "end",
            sre.AT_END_STRING: "end_string",
            sre.AT_BOUNDARY: "edge_a" if ascii_only else "edge",
            sre.AT_NON_BOUNDARY: "no_edge_a" if ascii_only else "no_edge",
        }
        return At(kinds[code])

    @staticmethod
    def _chars(items: list[tuple[Any, Any]], flags: int) -> Node:
        ascii_only = bool(flags & re.ASCII)
        parts: list[Ranges] = []
        spelling: list[str] = []
        negated = False
        for op, value in items:
            if op is sre.NEGATE:
                negated = True
            elif op is sre.LITERAL:
                parts.append(((value, value),))
                spelling.append(f"\\U{value:08x}")
            elif op is sre.RANGE:
                parts.append(((value[0], value[1]),))
                spelling.append(f"\\U{value[0]:08x}-\\U{value[1]:08x}")
            else:
                parts.append(category(_CATEGORIES[value], ascii_only))
                spelling.append(_CATEGORIES[value])
        exact = _united(tuple(parts), negated)
        if not flags & re.IGNORECASE:
            return Chars(exact)
        return Chars(ignoring_case(f"[{'^' * negated}{''.join(spelling)}]", exact, ascii_only))


@lru_cache(maxsize=256)
def _united(parts: tuple[Ranges, ...], negated: bool) -> Ranges:
    return complement(union(*parts)) if negated else union(*parts)


def _offset(pattern: str, spelling: str) -> int | None:
    """Where `spelling` first stands in `pattern` outside of classes and escapes."""
    pieces = re.finditer(rf"({spelling})|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL)
    return next((piece.start() for piece in pieces if piece[1]), None)


def repeat(item: Node, low: int, high: int | None) -> Node:
    """`item` repeated; a repeat of a repeat becomes one if the counts leave no gaps."""
    if high == 0:
        return EMPTY
    match item:
        case Repeat(inner, a, b) if _no_gaps(a, b, low, high):
            return Repeat(inner, a * low, None if high is None or b is None else b * high)
        case Seq(()):
            return item
        case _:
            return item if (low, high) == (1, 1) else Repeat(item, low, high)


def _no_gaps(a: int, b: int | None, low: int, high: int | None) -> bool:
    """Whether {a,b}{low,high} is the one interval {a*low, b*high}: k rounds reach up to where k + 1 rounds
    begin."""
    if low == high or a == 0:
        return True
    first = max(low, 1)
    joins_zero = low > 0 or a <= 1
    return joins_zero and (b is None or high == first or a * (first + 1) <= b * first + 1)


def trim_anchors(node: Node) -> Node:
    """Remove `^` at the start and `$` at the end: they are redundant when the whole text must match."""
    return _trim(_trim(node, 0, {"begin", "begin_line"}), -1, {"end", "end_line", "end_string"})


def _trim(node: Node, side: Literal[0, -1], kinds: set[str]) -> Node:
    match node:
        case At(kind) if kind in kinds:
            return EMPTY
        case Seq(items) if items:
            ends = _trim(items[side], side, kinds)
            rest = items[1:] if side == 0 else items[:-1]
            if ends == EMPTY:
                return _trim(Seq(rest), side, kinds)
            return Seq((ends, *rest) if side == 0 else (*rest, ends))
        case Alt(options):
            return Alt(tuple(_trim(option, side, kinds) for option in options))
        case _:
            return node


def positions(node: Node) -> int:
    """An upper bound of the automaton states that `node` needs with its counts written out."""
    match node:
        case Seq(items):
            return sum(positions(item) for item in items)
        case Alt(options):
            return 1 + sum(positions(option) for option in options)
        case Repeat(item, low, high):
            return 1 + (positions(item) + 1) * max(low if high is None else high, 1)
        case _:
            return 1


# -- Rust's syntax: classes are spelled as code points, so that \w or "ignore case" mean what Python means


def rust_spelling(pattern: str) -> str:
    """The language of re.fullmatch(pattern, .) as a Rust pattern that is matched as a whole. Raises
    BadConstraint (with the position of the mistake) or UnsupportedConstraint."""
    return spelled(parse(pattern))


def rust_literal(text: str) -> str:
    """`text` itself as a Rust pattern."""
    if any(0xD800 <= ord(char) <= 0xDFFF for char in text):
        raise BadConstraint("holds a lone surrogate, which no text has", where="constraint")
    return "".join(map(rust_point, map(ord, text))) or "(?:)"


def rust_point(value: int) -> str:
    return chr(value) if chr(value).isascii() and chr(value).isalnum() else f"\\x{{{value:X}}}"


def python_point(value: int) -> str:
    return chr(value) if chr(value).isascii() and chr(value).isalnum() else f"\\U{value:08X}"


def char_class(ranges: Ranges, point: Callable[[int], str] = rust_point) -> str:
    """A class of code points without surrogates, each spelled by `point`."""
    pairs = difference(ranges, SURROGATES)
    return "[" + "".join(point(a) if a == b else f"{point(a)}-{point(b)}" for a, b in pairs) + "]"


def spelled(node: Node, rules: Mapping[str, str] | None = None) -> str:
    """A tree as a Rust pattern. `rules`: the patterns of the rules that it refers to."""
    match node:
        case Chars(ranges):
            text = char_class(ranges)
            return text if text != "[]" else NOTHING
        case Seq(items):
            return "".join(spelled(item, rules) for item in items) or "(?:)"
        case Alt(options):
            return f"(?:{'|'.join(spelled(one, rules) for one in options)})" if options else NOTHING
        case Repeat(item, low, high):
            return f"(?:{spelled(item, rules)}){{{low},{'' if high is None else high}}}"
        case Ref(name):
            return f"(?:{(rules or {})[name]})"
        case At():
            raise _unsupported_condition(node)
