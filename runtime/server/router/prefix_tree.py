"""PrefixTree: the beginnings of the prompts that one worker was sent lately, in blocks of BLOCK_BYTES.

A radix tree whose edges all have one block: what differs within a block counts as different from its start.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

BLOCK_BYTES = 128
"""About 32 tokens of English."""


def blocks_of(prompt: bytes) -> list[bytes]:
    """The whole blocks of a prompt; its rest is left out."""
    end = len(prompt) - BLOCK_BYTES + 1
    return [prompt[start : start + BLOCK_BYTES] for start in range(0, end, BLOCK_BYTES)]


class _Node:
    __slots__ = ("block", "children", "parent")

    def __init__(self, parent: _Node | None, block: bytes) -> None:
        self.parent, self.block = parent, block
        self.children: dict[bytes, _Node] = {}


class PrefixTree:
    """`most`: blocks that are kept. The ends that were used longest ago go first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._root = _Node(None, b"")
        # Oldest first. A node is always touched after all that are below it, so the oldest is an end.
        self._order: OrderedDict[_Node, None] = OrderedDict()

    @property
    def size(self) -> int:
        """Blocks that are remembered."""
        return len(self._order)

    def match(self, blocks: Sequence[bytes]) -> int:
        """How many blocks, from the first on, are remembered together. Changes nothing."""
        node, count = self._root, 0
        for block in blocks:
            found = node.children.get(block)
            if found is None:
                break
            node, count = found, count + 1
        return count

    def insert(self, blocks: Sequence[bytes]) -> None:
        """Remember these; of more than are kept, the first ones."""
        node = self._root
        for block in blocks[: self._most]:
            found = node.children.get(block)
            if found is None:
                found = node.children[block] = _Node(node, block)
            node = found
        while node.parent is not None:
            self._order[node] = None
            self._order.move_to_end(node)
            node = node.parent
        while len(self._order) > self._most:
            oldest, _ = self._order.popitem(last=False)
            assert oldest.parent is not None
            del oldest.parent.children[oldest.block]
