"""StateMasks: the masks of one control of an automaton with counters, for all values of its counters.

The tokens are worked out once; a mask is put together from them for each interval of values in which no token
comes or goes. It keeps no masks itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from runtime.grammar.merged_trie import Ints
from runtime.grammar.symbolic_walk import Front, Walker

Boxes = tuple[tuple[tuple[int, int], ...], ...]


class StateMasks:
    """What may follow a control: `front` of `walker` begins there, `accepts` are its boxes of values that
    end a match. Immutable."""

    def __init__(self, walker: Walker, front: Front, accepts: Boxes = ()) -> None:
        found = walker.allowed(walker.run(front))
        radix = np.array(walker.radix, dtype=np.int64).reshape(-1, 1)
        always = ((found.low <= 0) & (found.high >= radix - 1)).all(axis=0)
        self._tree = walker.tree
        self._always = np.unique(found.nodes[always])
        self._nodes = found.nodes[~always]
        self._low, self._high = found.low[:, ~always], found.high[:, ~always]
        self._accepts = accepts
        self._breaks = [self._breaks_of(slot) for slot in range(len(radix))]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self._always, self._nodes, self._low, self._high)) + 1000

    def _breaks_of(self, slot: int) -> Ints:
        """The values at which something changes."""
        cuts = [self._low[slot], self._high[slot] + 1]
        cuts.extend(np.array([box[slot][0], box[slot][1] + 1], dtype=np.int64) for box in self._accepts)
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
        nodes = np.zeros(self._tree.nodes + 1, dtype=np.bool_)
        nodes[self._always] = True
        if len(self._nodes):
            column = np.array(values, dtype=np.int64).reshape(-1, 1)
            nodes[self._nodes[((self._low <= column) & (column <= self._high)).all(axis=0)]] = True
        return self._tree.pack(nodes)
