"""Which examples those tests try that draw them by chance: always the same ones, or with EXPLORE=NUMBER in
the environment those of that number. `make test-all` takes the number of its commit and prints it."""

from __future__ import annotations

import os

EXPLORING = bool(os.environ.get("EXPLORE"))
EXPLORE = int(os.environ["EXPLORE"]) if EXPLORING else 0
"""What examples are drawn from; 0 where nobody asked for new ones."""
SLOW_EXAMPLES = int(os.environ.get("SLOW_EXAMPLES", "100"))
"""How many of them each slow test of grammars and jumps tries, about."""


def tries(count: int) -> int:
    """How many examples a property tries: `count` where they are drawn anew, and else a quarter of that: the
    same ones again find little."""
    return count if EXPLORING else max(5, count // 4)
