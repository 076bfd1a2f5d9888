"""The less busy of two that are drawn (Mitzenmacher, "The Power of Two Choices in Randomized Load
Balancing"): nearly as even as always the idlest, and several routers do not all run to the same one."""

from __future__ import annotations

import random
from collections.abc import Sequence

from runtime.server.router.policies import C, PolicyOptions


class PowerOfTwo:
    def __init__(self, options: PolicyOptions) -> None:
        self._random = random.Random()

    def choose(self, prompt: bytes, candidates: Sequence[C], /) -> C:
        drawn = self._random.sample(candidates, min(2, len(candidates)))
        return min(drawn, key=lambda one: one.active)

    def forget(self, name: str, /) -> None:
        """It remembers nothing."""
