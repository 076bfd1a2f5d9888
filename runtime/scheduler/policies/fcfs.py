"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.scheduler.policies import Candidate


def order(waiting: Sequence[Candidate]) -> list[Candidate]:
    return sorted(waiting, key=lambda candidate: candidate.arrival)
