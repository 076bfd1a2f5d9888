"""CountNfa: a language tree as a nondeterministic automaton in which long repeats are counters.

A repeat that spells out to few characters, or was given up, is written out as states. It makes nothing
deterministic.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from runtime.grammar.automaton import Meter
from runtime.grammar.charset import Ranges
from runtime.grammar.regex_syntax import EMPTY, Alt, At, Chars, Node, Repeat, Seq, positions

MATCH = 0
MOST_SLOTS = 4
"""Counters open at the same time."""

Op = Literal["", "enter", "loop", "inc", "exit"]


def prune(node: Node) -> Node | None:
    """`node` without the parts that match nothing; None if nothing is left."""
    match node:
        case Chars(ranges):
            return node if any(a < 0xD800 or b > 0xDFFF for a, b in ranges) else None
        case At():
            return node
        case Seq(items):
            parts = [prune(item) for item in items]
            kept = tuple(part for part in parts if part is not None)
            return Seq(kept) if len(kept) == len(parts) else None
        case Alt(options):
            found = tuple(part for option in options if (part := prune(option)) is not None)
            return None if not found else found[0] if len(found) == 1 else Alt(found)
        case Repeat(item, low, high):
            inner = prune(item)
            if inner is None:
                return EMPTY if low == 0 else None
            return Repeat(inner, low, high)


def nullable(node: Node) -> bool:
    """Whether the empty text matches."""
    match node:
        case Chars() | At():
            return False
        case Seq(items):
            return all(map(nullable, items))
        case Alt(options):
            return any(map(nullable, options))
        case Repeat(item, low, _):
            return low == 0 or nullable(item)


class Step(NamedTuple):
    """A step that takes no character."""

    target: int
    op: Op = ""
    counter: int = -1


class Counter(NamedTuple):
    slot: int
    low: int
    high: int
    repeat: int


class CountNfa:
    """States by number: `char[q]` the set taken and `on[q]` what follows, or `steps[q]`. `scope[q]`: the open
    counter of each slot, outermost first."""

    def __init__(self, meter: Meter, unrolled: int, given_up: set[int]) -> None:
        self.sets: list[Ranges] = []
        self._numbers: dict[Ranges, int] = {}
        self._meter, self._unrolled, self._given_up = meter, unrolled, given_up
        self.char: list[int] = [-1]
        self.on: list[int] = [-1]
        self.steps: list[tuple[Step, ...]] = [()]
        self.scope: list[tuple[int, ...]] = [()]
        self.counters: list[Counter] = []

    def size(self, node: Node, depth: int = 0) -> int:
        """States that `node` takes, about."""
        match node:
            case Seq(items):
                return sum(self.size(item, depth) for item in items)
            case Alt(options):
                return 1 + sum(self.size(option, depth) for option in options)
            case Repeat(item, low, high):
                if self._counts(node, depth):
                    return 3 + self.size(item, depth + 1)
                return 1 + (self.size(item, depth) + 1) * max(low if high is None else high, 1)
            case _:
                return 1

    def counts_any(self, node: Node) -> bool:
        """Whether a repeat of `node` is counted."""
        match node:
            case Seq(parts) | Alt(parts):
                return any(map(self.counts_any, parts))
            case Repeat(item):
                return self._counts(node, 0) or self.counts_any(item)
            case _:
                return False

    def _counts(self, node: Repeat, depth: int) -> bool:
        most = node.low if node.high is None else node.high
        return (
            depth < MOST_SLOTS
            and id(node) not in self._given_up
            and most > 1
            and most * positions(node.item) >= self._unrolled
        )

    def _state(self, scope: tuple[int, ...], *steps: Step, char: int = -1, on: int = -1) -> int:
        self._meter.spend(1)
        self.char.append(char)
        self.on.append(on)
        self.steps.append(steps)
        self.scope.append(scope)
        return len(self.char) - 1

    def add(self, node: Node, then: int, scope: tuple[int, ...]) -> int:
        """The state from which `node`, and then `then`, is matched."""
        match node:
            case Chars(ranges):
                number = self._numbers.setdefault(ranges, len(self.sets))
                if number == len(self.sets):
                    self.sets.append(ranges)
                return self._state(scope, char=number, on=then)
            case Seq(items):
                for item in reversed(items):
                    then = self.add(item, then, scope)
                return then
            case Alt(options):
                return self._state(scope, *(Step(self.add(option, then, scope)) for option in options))
            case Repeat(item, low, high):
                if not self._counts(node, len(scope)):
                    return self._written_out(item, low, high, then, scope)
                if high is None:  # x{n,} is x{n}x*
                    then = self._written_out(item, 0, None, then, scope)
                    high = low
                return self._counted(node, low, high, then, scope)
            case At():
                raise AssertionError("conditions are not counted")

    def _counted(self, node: Repeat, low: int, high: int, then: int, scope: tuple[int, ...]) -> int:
        number = len(self.counters)
        # Rounds that take nothing only make the count up: without them there is no least count.
        low = 0 if nullable(node.item) else low
        self.counters.append(Counter(len(scope), low, high, id(node)))
        inside = (*scope, number)
        head = self._state(inside)
        end = self._state(inside, Step(head, "inc", number))
        body = self.add(node.item, end, inside)
        self.steps[head] = (Step(body, "loop", number), Step(then, "exit", number))
        return self._state(scope, Step(head, "enter", number))

    def _written_out(self, item: Node, low: int, high: int | None, then: int, scope: tuple[int, ...]) -> int:
        entry = then
        if high is None:
            loop = self._state(scope)
            body = self.add(item, loop, scope)
            self.steps[loop] = (Step(body), Step(then))
            entry = body if low else loop
            low = max(low - 1, 0)
        else:
            for _ in range(high - low):
                entry = self._state(scope, Step(self.add(item, entry, scope)), Step(then))
        for _ in range(low):
            entry = self.add(item, entry, scope)
        return entry
