"""Which parts of a recursive grammar an engine's lexer may read, longest match first, without changing the
language.

A lexer is many times faster than a parser of characters, but `[a-z]+` would take the `end` that may come
after it. So a part without recursion becomes a terminal only if no character that may follow it could also
lengthen it, or another terminal expected at the same position.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from runtime.grammar.automata.automaton import Limits, Meter
from runtime.grammar.automata.regex_syntax import Alt, Chars, Node, Ref, Repeat, Seq
from runtime.grammar.ebnf.overlap import Overlaps, bits_of, union_of
from runtime.grammar.ebnf.tree import Grammar, bottom_up, empty_rules, is_empty, size_of
from runtime.protocol.errors import BadConstraint

MAX_TERMINAL = 300
"""Characters of a terminal with its counts written out."""

MAX_RULES, MAX_TERMINALS = 1_000, 256
_LIMITS = Limits(work=100_000)
_ROUNDS = 12


class Split(NamedTuple):
    """An equal grammar: `terminals` are its rules that hold characters, and no rule; no other does."""

    grammar: Grammar
    terminals: frozenset[str]


def split(grammar: Grammar) -> Split:
    """`grammar` with the longest safe terminals; if that takes too long, with one for each character."""
    regular = bottom_up(grammar.rules)
    if len(grammar.rules) > MAX_RULES:
        return single(grammar)
    broken: set[Node] = set()
    try:
        meter = Meter(_LIMITS)
        for _ in range(_ROUNDS):
            result = _Folder(grammar, regular, broken).run()
            clashing = _clashing(result, meter)
            if not clashing:
                return result
            broken |= clashing
    except BadConstraint:
        pass  # it takes too long
    return single(grammar)


def single(grammar: Grammar) -> Split:
    """`grammar` with a terminal for each character."""
    return _Folder(grammar, None, set()).run()


class _Folder:
    """Writes the rules anew, with terminals for what is regular, save `broken`; regular None: for each
    character. Names of rules and of terminals cannot meet: the latter begin with a digit."""

    def __init__(self, grammar: Grammar, regular: list[str] | None, broken: set[Node]) -> None:
        self._grammar, self._broken = grammar, broken
        self._inlined: dict[str, Node | None] = {}
        self._names: dict[Node, str] = {}
        self._longer = regular is not None
        for name in regular or ():
            self._inlined[name] = self._inline(grammar.rules[name])

    def run(self) -> Split:
        rules, done = self._grammar.rules, dict[str, Node]()
        waiting = [self._grammar.root]
        while waiting:
            name = waiting.pop()
            if name not in done:
                done[name] = self._fold(rules[name], waiting)
        ordered = {name: done[name] for name in rules if name in done}
        ordered |= {name: node for node, name in self._names.items()}
        return Split(Grammar(ordered, self._grammar.root), frozenset(self._names.values()))

    def _inline(self, node: Node) -> Node | None:
        """`node` with the rules that it names written out; None: too long, or some rule recurs."""
        match node:
            case Ref(name):
                return self._inlined.get(name)
            case Seq(items):
                parts = self._all(items)
                return None if parts is None else Seq(parts)
            case Alt(options):
                parts = self._all(options)
                return None if parts is None else Alt(parts)
            case Repeat(item, low, high):
                inner = self._inline(item)
                repeat = None if inner is None else Repeat(inner, low, high)
                return repeat if repeat is not None and size_of(repeat) <= MAX_TERMINAL else None
            case _:
                return node

    def _all(self, nodes: tuple[Node, ...]) -> tuple[Node, ...] | None:
        parts: list[Node] = []
        size = 0
        for node in nodes:
            inner = self._inline(node)
            if inner is None:
                return None
            size += size_of(inner)
            if size > MAX_TERMINAL:
                return None
            parts.append(inner)
        return tuple(parts)

    def _terminal(self, node: Node | None) -> Ref | None:
        if node is None or node in self._broken or is_empty(node, frozenset()):
            return None
        return Ref(self._names.setdefault(node, str(len(self._names))))

    def _fold(self, node: Node, waiting: list[str]) -> Node:
        """`node` of the new grammar. waiting: gets the rules that it names."""
        whole = self._inline(node) if self._longer or isinstance(node, Chars) else None
        terminal = self._terminal(whole)
        if terminal is not None:
            return terminal
        match node:
            case Ref(name):
                waiting.append(name)
                return node
            case Seq(items):
                return Seq(tuple(self._fold(item, waiting) for item in items))
            case Alt(options):
                return Alt(tuple(self._fold(option, waiting) for option in options))
            case Repeat(item, low, high):
                if isinstance(whole, Repeat) and low == 0:
                    some = self._terminal(Repeat(whole.item, 1, high))
                    if some is not None:
                        return Repeat(some, 0, 1)
                return Repeat(self._fold(item, waiting), low, high)
            case _:
                raise AssertionError("one character is a terminal")


def _clashing(split: Split, meter: Meter) -> set[Node]:
    """Terminals of several characters with which the longest match could be a wrong one."""
    rules, root = split.grammar
    terminals = [name for name in rules if name in split.terminals]
    if len(terminals) > MAX_TERMINALS:
        raise meter.too_large(f"has more than {MAX_TERMINALS} terminals")
    follow = _Following(rules, root, terminals, meter)
    overlaps = Overlaps([rules[name] for name in terminals], meter)
    behind = [union_of(overlaps.firsts, after) for after in follow.after]
    clashing: set[Node] = set()
    for one, other in _together(follow, overlaps, meter):
        if overlaps.longer[one, other] & behind[one] or overlaps.longer[other, one] & behind[other]:
            bodies = [rules[terminals[number]] for number in (one, other)]
            clashing |= {body for body in bodies if not isinstance(body, Chars)}
    return clashing


def _together(follow: _Following, overlaps: Overlaps, meter: Meter) -> set[tuple[int, int]]:
    """The pairs of terminals that may be expected at one position and begin alike: all that may follow one
    terminal, and what follows two that the same text spells."""
    pairs: set[tuple[int, int]] = set()
    queue: list[tuple[int, int]] = []

    def enter(ones: int, others: int) -> None:
        meter.spend(ones.bit_count())
        for one in bits_of(ones):
            for other in bits_of(others):
                pair = min(one, other), max(one, other)
                if pair not in pairs and overlaps.alike(one, other):
                    pairs.add(pair)
                    queue.append(pair)

    for after in {follow.start, *follow.after}:
        enter(after, after)
    for one, other in queue:
        if one != other and overlaps.same(one, other):
            enter(follow.after[one], follow.after[other])
    return pairs


class _Following:
    """start: the terminals that may begin a text; after: those that may follow each; bits by number."""

    def __init__(self, rules: Mapping[str, Node], root: str, terminals: list[str], meter: Meter) -> None:
        self._meter = meter
        self._empty = empty_rules(rules)
        numbers = {name: 1 << number for number, name in enumerate(terminals)}
        self._inner = {name: node for name, node in rules.items() if name not in numbers}
        self._first = dict.fromkeys(rules, 0) | numbers
        self._changed = True
        while self._changed:
            self._changed = False
            for name, node in reversed(self._inner.items()):
                first = self._begins(node)
                self._changed = self._changed or first != self._first[name]
                self._first[name] = first
        self._after = dict.fromkeys(rules, 0)
        self._changed = True
        while self._changed:
            self._changed = False
            for name, node in self._inner.items():
                self._pass(node, self._after[name])
        self.start = self._first[root]
        self.after = [self._after[name] for name in terminals]

    def _begins(self, node: Node) -> int:
        self._meter.spend(1)
        match node:
            case Ref(name):
                return self._first[name]
            case Repeat(item):
                return self._begins(item)
            case Alt(parts) | Seq(parts):
                first = 0
                for part in parts:
                    first |= self._begins(part)
                    if isinstance(node, Seq) and not is_empty(part, self._empty):
                        break
                return first
            case _:
                raise AssertionError("characters are in terminals")

    def _pass(self, node: Node, then: int) -> None:
        """`then` may come after `node`: pass that on to its parts."""
        self._meter.spend(1)
        match node:
            case Ref(name):
                if then & ~self._after[name]:
                    self._after[name] |= then
                    self._changed = True
            case Repeat(item, _, high):
                self._pass(item, then if high == 1 else then | self._begins(item))
            case Alt(options):
                for option in options:
                    self._pass(option, then)
            case Seq(items):
                for item in reversed(items):
                    self._pass(item, then)
                    then = self._begins(item) | (then if is_empty(item, self._empty) else 0)
            case _:
                raise AssertionError("characters are in terminals")
