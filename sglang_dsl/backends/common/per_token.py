"""The lists of a stream's meta that have an entry per token, whole and by piece. Knows no backends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LISTS = (
    "output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs", "output_token_origins",
)  # fmt: skip


class PerToken:
    """Of one stream, whose backend sends them so far, or only what is new."""

    def __init__(self) -> None:
        self._held: dict[str, list[Any]] = {}
        self._given: dict[str, int] = {}

    def add(self, meta: Mapping[str, Any], *, new: bool = True, replaced: int = 0) -> None:
        """`new`: the lists hold what is new only; its first entries take the place of the last `replaced`."""
        for name in LISTS:
            if isinstance(found := meta.get(name), list):
                held = self._held.setdefault(name, [])
                if replaced:
                    del held[-replaced:]
                held += found if new else found[len(held) :]

    def piece(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """`meta` with the entries since the last piece."""
        fresh = {name: held[self._given.get(name, 0) :] for name, held in self._held.items()}
        self._given = {name: len(held) for name, held in self._held.items()}
        return {**meta, **fresh}

    def whole(self, meta: Mapping[str, Any]) -> dict[str, Any]:
        """`meta` with all entries."""
        return {**meta, **{name: list(held) for name, held in self._held.items()}}
