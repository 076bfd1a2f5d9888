"""Writes a grammar for engines: as Lark, as EBNF in a form that all readers agree on, or as one pattern.

Meaning for meaning: rule names are numbered, characters spelled by code point, and nothing is left to an
engine's own reading of escapes. It compiles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from runtime.grammar.automata.charset import SURROGATES, Ranges, difference
from runtime.grammar.ebnf.reading import MAX_NESTING
from runtime.grammar.ebnf.terminals import split
from runtime.grammar.ebnf.tree import Alt, Chars, Grammar, Node, Ref, Repeat, Seq, bottom_up

MAX_REGULAR = 20_000
"""Characters of a grammar without recursion, written out as one expression."""


def as_regex(grammar: Grammar) -> str | None:
    """The whole grammar as a pattern of Rust's regex crates, matched as a whole; None where it recurs, or
    spells out to more than MAX_REGULAR characters or MAX_NESTING groups inside of each other."""
    order = bottom_up(grammar.rules)
    if len(order) < len(grammar.rules):
        return None
    sizes: dict[str, int] = {}
    depths: dict[str, int] = {}
    text: dict[str, str] = {}
    for name in order:
        node = grammar.rules[name]
        sizes[name] = min(_size(node, sizes), MAX_REGULAR + 1)
        depths[name] = _depth(node, depths)
        if sizes[name] > MAX_REGULAR or depths[name] > MAX_NESTING:
            return None
        text[name] = _regex(node, text)
    return text[grammar.root]


def _depth(node: Node, depths: Mapping[str, int]) -> int:
    match node:
        case Chars():
            return 0
        case Ref(name):
            return 1 + depths[name]
        case Repeat(item):
            return 1 + _depth(item, depths)
        case Seq(parts) | Alt(parts):
            return 1 + max((_depth(part, depths) for part in parts), default=0)


def _size(node: Node, sizes: Mapping[str, int]) -> int:
    match node:
        case Chars():
            return 1
        case Ref(name):
            return sizes[name]
        case Seq(parts) | Alt(parts):
            return 1 + sum(_size(part, sizes) for part in parts)
        case Repeat(item, low, high):
            return 1 + _size(item, sizes) * max(low if high is None else high, 1)


def _regex(node: Node, text: Mapping[str, str]) -> str:
    match node:
        case Chars(ranges):
            return _rust_class(ranges)
        case Ref(name):
            return f"(?:{text[name]})"
        case Seq(items):
            return "".join(_regex(item, text) for item in items) or "(?:)"
        case Alt(options):
            return "(?:" + "|".join(_regex(option, text) for option in options) + ")"
        case Repeat(item, low, high):
            return f"(?:{_regex(item, text)}){{{low},{'' if high is None else high}}}"


def _rust_class(ranges: Ranges) -> str:
    ranges = difference(ranges, SURROGATES)
    return "[" + "".join(_span(a, b, _rust_point) for a, b in ranges) + "]"


def _span(first: int, last: int, point: Callable[[int], str]) -> str:
    return point(first) if first == last else f"{point(first)}-{point(last)}"


def _rust_point(value: int) -> str:
    return chr(value) if chr(value).isascii() and chr(value).isalnum() else f"\\x{{{value:X}}}"


def to_lark(grammar: Grammar) -> str:
    """The grammar in llguidance's variant of Lark: one terminal where it is regular; where it recurs, those
    that may be matched greedily (see runtime.grammar.ebnf.terminals)."""
    pattern = as_regex(grammar)
    if pattern is not None:
        return f"start: /{pattern}/\n"
    (rules, root), terminals = split(grammar)
    names = {name: f"T{n}" if name in terminals else f"r{n}" for n, name in enumerate(rules)}
    lines = [f"start: {names[root]}"]
    for name, node in rules.items():
        text = f"/{_regex(node, {})}/" if name in terminals else _lark(node, names)
        lines.append(f"{names[name]}: {text}")
    return "\n".join(lines) + "\n"


def _lark(node: Node, names: Mapping[str, str]) -> str:
    match node:
        case Chars(ranges):
            return f"/{_rust_class(ranges)}/"
        case Ref(name):
            return names[name]
        case Seq(items):
            return " ".join(_lark_item(item, names) for item in items) or '""'
        case Alt(options):
            return " | ".join(_lark_item(option, names) for option in options)
        case Repeat(item, low, high):
            return f"({_lark(item, names)}){{{low},{'' if high is None else high}}}"


def _lark_item(node: Node, names: Mapping[str, str]) -> str:
    match node:
        case Alt():
            return f"({_lark(node, names)})"
        case _:
            return _lark(node, names)


def to_narrow_ebnf(grammar: Grammar) -> str:
    """The grammar in plain EBNF: rule names of letters and digits, characters by code point, no `.`."""
    names = {name: f"r{number}" for number, name in enumerate(grammar.rules)}
    lines = [f"root ::= {names[grammar.root]}"]
    lines.extend(f"{names[name]} ::= {_narrow(node, names)}" for name, node in grammar.rules.items())
    return "\n".join(lines) + "\n"


def _narrow(node: Node, names: Mapping[str, str]) -> str:
    match node:
        case Chars(ranges):
            spelled = (_span(a, b, _wide_point) for a, b in difference(ranges, SURROGATES))
            return "[" + "".join(spelled) + "]"
        case Ref(name):
            return names[name]
        case Seq(items):
            return " ".join(_narrow_item(item, names) for item in items) or '""'
        case Alt(options):
            return " | ".join(_narrow_item(option, names) for option in options)
        case Repeat(item, low, high):
            return f"({_narrow(item, names)}){{{low},{'' if high is None else high}}}"


def _narrow_item(node: Node, names: Mapping[str, str]) -> str:
    match node:
        case Alt():
            return f"({_narrow(node, names)})"
        case _:
            return _narrow(node, names)


def _wide_point(value: int) -> str:
    return chr(value) if chr(value).isascii() and chr(value).isalnum() else f"\\U{value:08X}"
