"""OutlinesJumpForwardMap: the text that a regular expression forces, by symbols and by bytes. The scheduler
uses runtime.grammar.jump_plan, for any Matcher.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from runtime.grammar.automata.dfa import LONGEST_FORCED, compile_regex

__all__ = ["JumpEdge", "OutlinesJumpForwardMap"]


@dataclass(frozen=True, slots=True)
class JumpEdge:
    """The only way on from a state. `symbol`: None if several characters share the next byte."""

    symbol: str | None
    symbol_next_state: int | None
    byte: int
    byte_next_state: int


class OutlinesJumpForwardMap:
    """Forced text of a regular expression, state by state, in pieces of at most LONGEST_FORCED. A state in
    which the text may end forces nothing. Raises BadConstraint or UnsupportedConstraint."""

    def __init__(self, regex: str) -> None:
        self._dfa = compile_regex(regex)
        self.initial_state = 0

    def edge(self, state: int) -> JumpEdge | None:
        """The JumpEdge of `state`, or None when it forces nothing."""
        only = self._dfa.only_byte(state)
        if only is None:
            return None
        symbol, end = self._symbol(state)
        return JumpEdge(symbol, end, only[0], only[1])

    def _symbol(self, state: int) -> tuple[str | None, int | None]:
        """The only character that may follow a state between two characters, and the state after it."""
        if state % self._dfa.nodes and self._dfa.nodes > 1:
            return None, None
        forced = self._dfa.forced(state)[0]
        for size in range(1, min(4, len(forced)) + 1):
            end = self._dfa.walk(state, forced[:size])
            if end % self._dfa.nodes == 0:
                with suppress(UnicodeDecodeError):
                    return forced[:size].decode(), end
        return None, None

    def jump_forward_symbol(self, state: int) -> tuple[str, int]:
        """The longest forced text from `state`, in whole characters, and the state after it."""
        text = ""
        while len(text) < LONGEST_FORCED:
            edge = self.edge(state)
            if edge is None or edge.symbol is None:
                break
            assert edge.symbol_next_state is not None
            text += edge.symbol
            state = edge.symbol_next_state
        return text, state

    def jump_forward_byte(self, state: int) -> list[tuple[int, int]]:
        """The longest forced path of bytes from `state`: each byte with the state after it."""
        path: list[tuple[int, int]] = []
        while len(path) < LONGEST_FORCED and (only := self._dfa.only_byte(state)) is not None:
            path.append(only)
            state = only[1]
        return path
