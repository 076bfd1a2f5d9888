"""Writes a grammar for engines: as Lark, as plain EBNF, or as one pattern. Rules are numbered and characters
spelled by code point, so nothing depends on how an engine reads escapes.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.grammar.automata.regex_syntax import (
    Alt,
    At,
    Chars,
    Node,
    Ref,
    Repeat,
    Seq,
    char_class,
    python_point,
    spelled,
)
from runtime.grammar.ebnf.reading import MAX_NESTING
from runtime.grammar.ebnf.terminals import split
from runtime.grammar.ebnf.tree import Grammar, bottom_up, nesting, size_of

MAX_REGULAR = 20_000
"""Characters of a grammar without recursion, written out as one expression."""


def as_regex(grammar: Grammar) -> str | None:
    """The whole grammar as a pattern of Rust's regex crates; None if it recurs, or spells out to more than
    MAX_REGULAR characters or MAX_NESTING groups inside of each other."""
    order = bottom_up(grammar.rules)
    if len(order) < len(grammar.rules):
        return None
    sizes: dict[str, int] = {}
    depths: dict[str, int] = {}
    text: dict[str, str] = {}
    for name in order:
        node = grammar.rules[name]
        sizes[name] = min(size_of(node, sizes), MAX_REGULAR + 1)
        depths[name] = nesting(node, depths)
        if sizes[name] > MAX_REGULAR or depths[name] > MAX_NESTING:
            return None
        text[name] = spelled(node, text)
    return text[grammar.root]


def to_lark(grammar: Grammar) -> str:
    """The grammar in llguidance's variant of Lark: one terminal if it is regular, else those that may be
    matched greedily (see runtime.grammar.ebnf.terminals)."""
    pattern = as_regex(grammar)
    if pattern is not None:
        return f"start: /{pattern}/\n"
    (rules, root), terminals = split(grammar)
    names = {name: f"T{n}" if name in terminals else f"r{n}" for n, name in enumerate(rules)}
    lines = [f"start: {names[root]}"]
    for name, node in rules.items():
        text = f"/{spelled(node)}/" if name in terminals else _rule(node, names)
        lines.append(f"{names[name]}: {text}")
    return "\n".join(lines) + "\n"


def to_narrow_ebnf(grammar: Grammar) -> str:
    """The grammar in plain EBNF: rule names of letters and digits, characters by code point, no `.`."""
    names = {name: f"r{number}" for number, name in enumerate(grammar.rules)}
    lines = [f"root ::= {names[grammar.root]}"]
    lines.extend(f"{names[name]} ::= {_rule(node, names)}" for name, node in grammar.rules.items())
    return "\n".join(lines) + "\n"


def _rule(node: Node, names: Mapping[str, str]) -> str:
    """The right side of a rule, in the syntax that EBNF shares with Lark, whose rules hold no characters."""
    match node:
        case Chars(ranges):
            return char_class(ranges, python_point)
        case Ref(name):
            return names[name]
        case Seq(items):
            return " ".join(_item(item, names) for item in items) or '""'
        case Alt(options):
            return " | ".join(_item(option, names) for option in options)
        case Repeat(item, low, high):
            return f"({_rule(item, names)}){{{low},{'' if high is None else high}}}"
        case At():
            raise AssertionError("grammars have no conditions")


def _item(node: Node, names: Mapping[str, str]) -> str:
    return f"({_rule(node, names)})" if isinstance(node, Alt) else _rule(node, names)
