"""StateMasks: the masks of one control of an automaton with counters, for all values of its counters.

The tokens are worked out once; a mask is put together from them for each interval of values in which no token
comes or goes. It keeps no masks itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.grammar.counted_dfa import CountedByteDfa
from runtime.grammar.length_tables import Inside, LengthTables, find_inside
from runtime.grammar.symbolic_walk import Walker, rules_of
from runtime.grammar.trie import Ints, TokenTrie

_FEW = 512


class StateMasks:
    """What may follow `control`, between two characters or at `node` of the UTF-8 table. Immutable."""

    def __init__(
        self, dfa: CountedByteDfa, trie: TokenTrie, tables: LengthTables, control: int, node: int
    ) -> None:
        walker = Walker(dfa, trie, rules_of(dfa))
        inside = find_inside(dfa, control) if node == 0 else None
        self._inside: Inside | None = inside
        self._words = -(-trie.size // 32)
        self._last = 0
        self._rows = self._needs = None
        if inside is None:
            front = walker.start(control, node)
        else:
            table = tables.table(dfa, inside)
            self._last, self._rows, self._needs = inside.last, table.rows, table.needs
            front = tables.leaving(dfa, inside, table)
        found = walker.allowed(walker.run(front))
        tokens, source = trie.with_equals(found.tokens)
        low, high = found.low[:, source], found.high[:, source]
        radix = np.array(dfa.counts.radix, dtype=np.int64).reshape(-1, 1)
        always = ((low <= 0) & (high >= radix - 1)).all(axis=0)
        self._base = self._packed(tokens[always])
        self._tokens, self._low, self._high = tokens[~always], low[:, ~always], high[:, ~always]
        self._accepts = dfa.counts.accepts[control] if node == 0 else ()
        self._breaks = [self._breaks_of(slot) for slot in range(len(radix))]

    @property
    def nbytes(self) -> int:
        parts = (self._base, self._tokens, self._low, self._high)
        return sum(part.nbytes for part in parts) + 1000

    def _breaks_of(self, slot: int) -> Ints:
        """The values at which something changes."""
        cuts = [self._low[slot], self._high[slot] + 1]
        cuts.extend(np.array([box[slot][0], box[slot][1] + 1], dtype=np.int64) for box in self._accepts)
        if self._inside is not None and self._inside.slot == slot and self._needs is not None:
            cuts.append(self._last - self._needs + 1)
        return np.unique(np.concatenate(cuts))

    def region(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """The same for values with the same mask."""
        pairs = zip(self._breaks, values, strict=True)
        return tuple(int(np.searchsorted(breaks, value, side="right")) for breaks, value in pairs)

    def accepts(self, values: tuple[int, ...]) -> bool:
        return any(
            all(low <= value <= high for value, (low, high) in zip(values, box, strict=True))
            for box in self._accepts
        )

    def bits(self, values: tuple[int, ...]) -> npt.NDArray[np.uint32]:
        """The tokens allowed with these values, as packed words of the vocabulary; a new array."""
        bits = self._base.copy()
        if self._inside is not None and self._rows is not None and self._needs is not None:
            slot = self._inside.slot
            free = -1 if slot is None else self._last - values[slot]
            number = int(np.searchsorted(self._needs, free, side="right"))
            if number:
                bits |= self._rows[number - 1]
        if len(self._tokens):
            column = np.array(values, dtype=np.int64).reshape(-1, 1)
            now = self._tokens[((self._low <= column) & (column <= self._high)).all(axis=0)]
            if len(now) > _FEW:
                bits |= self._packed(now)
            elif len(now):
                np.bitwise_or.at(bits, now >> 5, np.uint32(1) << (now & 31).astype(np.uint32))
        return bits

    def _packed(self, tokens: Ints) -> npt.NDArray[np.uint32]:
        flags = np.zeros(self._words * 32, dtype=np.bool_)
        flags[tokens] = True
        return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)
