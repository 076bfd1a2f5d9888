"""One after another, whatever they have to do."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.server.router.policies import C, PolicyOptions


class RoundRobin:
    def __init__(self, options: PolicyOptions) -> None:
        self._last: dict[str, int] = {}
        self._count = 0

    def choose(self, prompt: bytes, candidates: Sequence[C], /) -> C:
        """Whose turn was longest ago: a worker that comes back does not shift the others' turns."""
        found = min(candidates, key=lambda one: self._last.get(one.name, 0))
        self._count += 1
        self._last[found.name] = self._count
        return found

    def forget(self, name: str, /) -> None:
        """Its turn comes as ever."""
