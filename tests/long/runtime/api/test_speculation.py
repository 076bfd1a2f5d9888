"""process/runtime/api/test_speculation.py, at length."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from runtime.api import Engine
from tests.process.runtime.api.test_differential import GUESSING, ROOMY, agree, answers, mixed

REQUESTS = 4 * int(os.environ.get("SLOW_EXAMPLES", "100"))


def test_many_requests_of_all_kinds() -> None:
    """SLOW_EXAMPLES=500 makes 2,000. A draw that falls on the border between two tokens, to the last bits of
    the logits, may fall on either side of it in another batch, guesses or not: of 2,000 one did so."""

    def come_to(**options: Any) -> tuple[list[Any], int]:
        with Engine("pocket", **ROOMY, **options) as engine:
            found: list[Any] = []
            for seed in range(REQUESTS // 36 + 1):
                found += asyncio.run(answers(engine, mixed(seed, 36), at_once=True))
            return found, engine.state().get("spec_accepted_tokens_total", 0)

    asked = [one for seed in range(REQUESTS // 36 + 1) for one in mixed(seed, 36)]
    sampled = [bool((one.sampling_params or {}).get("temperature")) for one in asked]
    expected, _ = come_to()
    for options in ({"overlap": True}, {"overlap": False, "jump_forward": False}):
        found, accepted = come_to(**GUESSING, **options)
        other = [number for number, pair in enumerate(zip(expected, found)) if not all(map(agree, *pair))]
        assert all(sampled[number] for number in other), "a greedy answer is another"
        assert len(other) <= REQUESTS // 1000
        assert accepted > REQUESTS
