"""Longest prefix match first: what the cache holds is used before it is evicted; near-optimal for shared
prefixes (Zheng et al., "SGLang", theorem 3.1). Ageing keeps it fair: after MAX_WAIT ticks a request goes by
arrival, first.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.scheduler.policies import Candidate

MAX_WAIT = 64  # scheduler ticks


def order(waiting: Sequence[Candidate]) -> list[Candidate]:
    aged = [candidate for candidate in waiting if candidate.waited >= MAX_WAIT]
    others = [candidate for candidate in waiting if candidate.waited < MAX_WAIT]
    aged.sort(key=lambda candidate: candidate.arrival)
    others.sort(key=lambda candidate: (-candidate.matched, candidate.arrival))
    return aged + others
