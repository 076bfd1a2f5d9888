"""A pair of engines whose link fails all the time, on purpose: each request is answered rightly, or with an
error that says why; nothing is left behind, and nothing is answered with the KV of another."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from runtime.api import Engine
from runtime.protocol.errors import RuntimeFault
from tests.process.runtime.disagg.test_engine_pair import SMALL, Pair, asked
from tests.unit.runtime.disagg.asked import differences, merged, request, without_room

FAULTS = "corrupt=0.02,cut=0.001,fail=0.02,lose=0.01,delay=0.05,delay_s=0.2,damage=0.02,seed=5"
AT_ONCE = 40
CAUSES = {
    "transfer_failed", "transfer_peer_lost", "transfer_corrupt", "transfer_late", "aborted",
    "deadline_exceeded",
}  # fmt: skip


@pytest.mark.parametrize(
    ("backend", "count"),
    [("tcp", 60)],
)
def test_a_link_that_fails_all_the_time(monkeypatch: pytest.MonkeyPatch, backend: str, count: int) -> None:
    if backend == "nixl":
        pytest.importorskip("nixl")
    monkeypatch.setenv("SGLANG_DSL_TRANSFER_FAULTS", FAULTS)
    dice = random.Random(count)
    # Small pools, and rows for a few requests only.
    options = {"max_total_tokens": 700, "page_size": 4, "chunked_prefill_size": 64, "max_running_requests": 6}
    with Engine("pocket", **SMALL) as alone:
        pair = Pair(backend, **{**options, "disaggregation_timeout_s": 4.0, "num_reserved_decode_tokens": 16})
        try:
            kinds = [limited(request(dice, 1, pair.at)) for _ in range(min(count, 50))]
            right = asyncio.run(answered(alone, kinds))
            found = asyncio.run(ask(pair, kinds, right, dice, count))
            assert found["right"] > count / 4, found
            assert sum(found.values()) == count
            assert set(found) <= {"right", *CAUSES}, found
            assert len(found) > 1
            monkeypatch.delenv("SGLANG_DSL_TRANSFER_FAULTS")
            pair.check_empty(rows=12)
            print(backend, dict(found))
        finally:
            pair.close()


def limited(fields: dict[str, Any]) -> dict[str, Any]:
    fields["sampling_params"].pop("n", None)
    return fields


async def answered(alone: Engine, kinds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [(await asked(alone, without_room(fields)))[0] for fields in kinds]


async def ask(
    pair: Pair, kinds: list[dict[str, Any]], right: list[dict[str, Any]], dice: random.Random, count: int
) -> Counter[str]:
    places = asyncio.Semaphore(AT_ONCE)
    found: Counter[str] = Counter()

    async def one(room: int) -> None:
        kind = dice.randrange(len(kinds))
        fields = {**kinds[kind], "bootstrap_room": room, "timeout_s": 60.0}
        async with places:
            both = asyncio.gather(
                asked(pair.prefill, fields), asked(pair.decode, fields), return_exceptions=True
            )
            if dice.random() < 0.004:
                await asyncio.sleep(dice.random() / 10)
                dice.choice([pair.prefill, pair.decode]).abort(None)  # all that there are
            first, second = await both
        for outcome in (second, first):
            if isinstance(outcome, RuntimeFault):
                assert str(outcome)
                found[outcome.code] += 1
                return
            assert not isinstance(outcome, BaseException), outcome
        assert differences(right[kind], merged(first[0], second[0])) == []
        found["right"] += 1

    await asyncio.gather(*(one(room + 1) for room in range(count)))
    return found
