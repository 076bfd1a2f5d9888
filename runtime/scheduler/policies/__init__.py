"""Schedule policies: `order(waiting)` functions by name. A policy orders; it admits nothing and knows no
slots.

A policy returns a permutation of what it is given (in order of arrival) and lets nobody starve: whoever
waited long enough comes first, whatever arrives later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from runtime.protocol.registry import Registry


class Candidate(Protocol):
    """What a policy may know of a waiting request."""

    @property
    def arrival(self) -> int:
        """Place in the order of arrival."""
        ...

    @property
    def waited(self) -> int:
        """Scheduler ticks since it could have been admitted."""
        ...

    @property
    def priority(self) -> int: ...

    @property
    def new_tokens(self) -> int:
        """Tokens it may still generate."""
        ...

    @property
    def matched(self) -> int:
        """Tokens of its prompt that the cache holds now. Looked up when first asked for."""
        ...


Order = Callable[[Sequence[Candidate]], list[Candidate]]

POLICIES: Registry[Order] = Registry(
    "schedule policy",
    {
        "fcfs": "runtime.scheduler.policies.fcfs:order",
        "lpm": "runtime.scheduler.policies.lpm:order",
    },
)
