"""Search: the first match of some patterns in a text that is read piece by piece.

A match is reported as soon as `re.search` over the text so far would find one, with the leftmost beginning.
The text is never read again, so no pattern is slow: at most three states of the automaton are created per
character. A lone surrogate stands for a byte that is no text and counts as U+FFFD.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from runtime.grammar.automata.automaton import MATCH, START, Limits, Meter, Nfa, Subsets, partition
from runtime.grammar.automata.charset import EVERYTHING, category
from runtime.grammar.automata.regex_syntax import (
    Alt,
    Chars,
    Node,
    Repeat,
    Seq,
    has_conditions,
    parse,
    positions,
)
from runtime.protocol.errors import BadConstraint

MAX_POSITIONS = 4096
MAX_STATES = 4096
_ANY = Chars(EVERYTHING)
_DEAD: tuple[frozenset[int], Any] = (frozenset(), START)


class _Unanchored:
    """The automaton of "anything, then `node`", with states created as they are visited: ints, carried over a
    reset() by their keys. It accepts as `re.search` on the text so far; a match ends at the last character,
    or one before it. Not thread-safe."""

    def __init__(self, node: Node) -> None:
        self._meter = Meter(Limits(work=1 << 62, seconds=float("inf")))
        nfa = Nfa(self._meter)
        self.conditions = has_conditions(node)
        self._behind, end = -1, MATCH
        if self.conditions:  # whether they hold may depend on the next character
            self._behind = nfa.add(Repeat(_ANY, 0, None), MATCH)
            end = nfa.state(-1, (self._behind,))
        self._inner = nfa.add(node, end)
        self._loop = nfa.add(Repeat(_ANY, 0, None), self._inner)
        self._body = nfa.on[self._loop][0]
        extra = (((10, 10),), category(r"\w", False), category(r"\w", True)) if self.conditions else ()
        self._intervals, self._cells = partition([*nfa.sets, *extra], self._meter)
        self._firsts = [first for first, _, _ in self._intervals]
        self._nfa = nfa
        self._class: dict[str, int] = {}
        self.reset()

    def reset(self) -> None:
        """Forget all states; state 0 is the first again."""
        self._subsets = Subsets(self._nfa, self._cells, self._intervals, self._meter, self.conditions)
        self._rows: list[dict[int, int] | None] = []
        self._accepts: dict[int, bool] = {}
        self._subsets.number(frozenset((self._loop,)), START)
        self._old: dict[int, int] = {}

    def __len__(self) -> int:
        """States created so far."""
        return self._subsets.count

    def key(self, state: int) -> Any:
        return self._subsets.key(state)

    def enter(self, key: Any) -> int:
        """The state of a key."""
        return self._subsets.enter(key)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        kind = self._class.get(char)
        if kind is None:
            point = 0xFFFD if "\ud800" <= char <= "\udfff" else ord(char)
            at = bisect_right(self._firsts, point) - 1
            kind = self._class[char] = self._intervals[at][2]
        after = self._row(state).get(kind)
        return self._subsets.enter(_DEAD) if after is None else after

    def _row(self, state: int) -> dict[int, int]:
        while len(self._rows) <= state:
            self._rows.append(None)
        row = self._rows[state]
        if row is None:
            row = self._rows[state] = {
                number: target
                for classes, target in self._subsets.expand(state)
                for number in classes.tolist()
            }
        return row

    def accepts(self, state: int) -> bool:
        if state not in self._accepts:
            self._accepts[state] = self._subsets.accepts(state)
        return self._accepts[state]

    def under_way(self, before: int, char: str) -> bool:
        """Whether a match that began by now may continue after `char`, read in the state `before`. (The state
        after it is not enough: with "x*y" an x leads back to the first state.)"""
        return bool(self._subsets.key(self.step(self.without_new(before), char))[0])

    def without_new(self, state: int) -> int:
        """The state in which a match may begin here or have begun before, and none begins later."""
        if state not in self._old:
            core, before = self._subsets.key(state)
            if self.conditions:
                core = frozenset(self._inner if one == self._loop else one for one in core)
            else:
                core = core - {self._body}
            self._old[state] = self._subsets.enter((core, before))
        return self._old[state]

    def ended_before(self, state: int) -> bool:
        """Whether, in an accepting state, the match ended before the last character."""
        return self.conditions and self._behind in self._subsets.key(state)[0]


class SearchState(NamedTuple):
    """The state of a search. key: of the automaton's state; window: the characters since no match was in
    progress; base: key of the state at the beginning of the window; held: how many of the last characters may
    belong to a match."""

    key: Any
    base: Any
    window: str
    held: int


@dataclass(frozen=True, slots=True)
class Match:
    """start: characters from its beginning to the end of the last piece; after: those behind its end."""

    text: str
    start: int
    after: int


class Search:
    """A search for any of `patterns`, shared by requests and threads. Raises BadConstraint or
    UnsupportedConstraint for one that is no regular expression, not supported exactly, too large, or matches
    the empty text."""

    def __init__(self, patterns: Sequence[str]) -> None:
        nodes = [_node(pattern) for pattern in patterns]
        spelled = sum(map(positions, nodes))
        if spelled > MAX_POSITIONS:
            raise BadConstraint(
                f"the patterns spell out to {spelled} characters; at most {MAX_POSITIONS} are taken",
                where="regex",
                hint="use smaller counts",
            )
        self._automaton = _Unanchored(Alt(tuple(nodes)))
        if self._automaton.accepts(0):
            pattern = next(pattern for pattern, node in zip(patterns, nodes) if _Unanchored(node).accepts(0))
            raise BadConstraint(
                f"{pattern!r} matches the empty text, so it would end every generation at once",
                where="regex",
            )
        self._longest = max((_longest(node) for node in nodes), default=0)
        self._lock = threading.Lock()
        first = self._automaton.key(0)
        self.begin = SearchState(first, first, "", 0)

    def feed(self, before: SearchState, text: str) -> tuple[SearchState, Match | None]:
        """Read on; the search ends with a match."""
        with self._lock:
            return self._feed(before, text)

    def _feed(self, before: SearchState, text: str) -> tuple[SearchState, Match | None]:
        automaton = self._automaton
        if len(automaton) > MAX_STATES:
            automaton.reset()
        state = automaton.enter(before.key)
        base, begun = before.base, -len(before.window)
        for index, char in enumerate(text):
            sooner, state = state, automaton.step(state, char)
            if automaton.accepts(state):
                window = (before.window + text[: index + 1])[len(before.window) + begun :]
                return before, self._match(base, window, automaton.ended_before(state), len(text) - index - 1)
            if not automaton.under_way(sooner, char):
                base, begun = automaton.key(state), index + 1
        window = text[begun:] if begun >= 0 else before.window + text
        held = min(len(window), int(min(self._longest, 1 << 40)))
        return SearchState(automaton.key(state), base, window, held), None

    def _match(self, base: Any, window: str, ended_before: bool, after: int) -> Match:
        """The leftmost match that ends with `window`; `after`: characters of the piece behind it."""
        low, high = 0, len(window)
        while low < high:  # does a match begin at `middle` or before it?
            middle = (low + high) // 2
            if self._begins(base, window, middle):
                high = middle
            else:
                low = middle + 1
        end = len(window) - ended_before
        return Match(window[low : max(low, end)], after + len(window) - low, after)

    def _begins(self, base: Any, window: str, last: int) -> bool:
        automaton = self._automaton
        state = automaton.enter(base)
        for char in window[:last]:
            state = automaton.step(state, char)
        state = automaton.without_new(state)
        for char in window[last:]:
            state = automaton.step(state, char)
        return automaton.accepts(state)


def _node(pattern: str) -> Node:
    try:
        return parse(pattern, anchored=False)
    except RecursionError:
        raise BadConstraint("groups are nested too deeply", where="regex") from None


def _longest(node: Node) -> float:
    """Characters of the longest match; one more if a condition depends on the next one."""
    match node:
        case Seq(items):
            return sum(map(_longest, items))
        case Alt(options):
            return max(map(_longest, options), default=0)
        case Repeat(item, _, high):
            return float("inf") if high is None else high * _longest(item)
        case _:
            return 1
