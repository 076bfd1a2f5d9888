"""Directory: which servers there are. Replicas announce themselves again and again, and are forgotten when
they stop; routers ask. It runs as one actor beside the driver and knows no Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

FORGOTTEN_S = 30.0
"""Without an announcement. Replicas announce themselves every few seconds."""


class Member(NamedTuple):
    """role: worker, prefill or decode."""

    role: str
    url: str


class Directory:
    """`key`: the API key of all servers in it, which routers and replicas ask for."""

    def __init__(self, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._key, self._clock = key, clock
        self._seen: dict[str, tuple[float, tuple[Member, ...]]] = {}

    def key(self) -> str:
        return self._key

    def announce(self, replica: str, members: tuple[Member, ...]) -> None:
        """The replica of this id lives, and these are its servers."""
        self._seen[replica] = self._clock(), members

    def leave(self, replica: str) -> None:
        """It ends, and wants no more requests."""
        self._seen.pop(replica, None)

    def members(self) -> list[Member]:
        """The servers that are there, in the order in which they came."""
        oldest = self._clock() - FORGOTTEN_S
        self._seen = {name: one for name, one in self._seen.items() if one[0] > oldest}
        return [member for _, members in self._seen.values() for member in members]
