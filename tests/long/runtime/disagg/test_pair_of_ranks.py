"""Prompts and outputs computed by different numbers of ranks: the answers are those of one engine."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.api import Engine
from runtime.protocol.errors import RuntimeFault, TransferLate
from tests.process.runtime.disagg.test_engine_pair import Pair, compare
from tests.unit.runtime.disagg.asked import request
from tests.unit.runtime.engine.ranks.ranks_here import rank_processes

NIXL = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="no nixl")
SMALL = {"dtype": "float32", "device": "cpu", "threads": 1, "max_total_tokens": 8192}


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    with Engine("pocket", runner_process=False, **SMALL) as engine:
        yield engine


class PairOfRanks(Pair):
    """`prefill`, `decode`: how many ranks each has."""

    def __init__(self, backend: str, prefill: int, decode: int, **options: Any) -> None:
        options = {**SMALL, "disaggregation_transfer_backend": backend, **options}
        self.prefill = Engine(
            "pocket", disaggregation_mode="prefill", disaggregation_bootstrap_port=0,
            tp_size=prefill, **options,
        )  # fmt: skip
        try:
            self.decode = Engine("pocket", disaggregation_mode="decode", tp_size=decode, **options)
        except BaseException:
            self.prefill.close()
            raise
        host, _, port = self.prefill.state()["bootstrap"].rpartition(":")
        self.at = {"bootstrap_host": host, "bootstrap_port": int(port)}


@pytest.mark.parametrize(
    ("backend", "prefill", "decode"),
    [
        ("local", 2, 1),
        ("local", 1, 2),
        ("tcp", 2, 1),
        ("tcp", 1, 4),
        pytest.param("nixl", 2, 1, marks=NIXL),
        pytest.param("nixl", 1, 2, marks=NIXL),
    ],
)
def test_the_same_answers_as_of_one_engine(alone: Engine, backend: str, prefill: int, decode: int) -> None:
    """Pocket has two key heads: of four ranks two hold each."""
    pair = PairOfRanks(backend, prefill, decode, page_size=16, chunked_prefill_size=64)
    try:
        dice = random.Random(prefill + 10 * decode)
        requests = [request(dice, 1 + 10 * number, pair.at) for number in range(40)]
        assert asyncio.run(compare(alone, pair, requests)) == []
        assert pair.decode.state()["num_transferred_requests_total"] >= 40
        pair.check_empty()
    finally:
        pair.close()


def test_a_lost_rank_of_the_prompts_engine_is_told_by_both() -> None:
    others = rank_processes()
    pair = PairOfRanks("tcp", 2, 1, disaggregation_heartbeat_s=1.0, disaggregation_timeout_s=10.0)
    try:
        params = {"max_new_tokens": 2, "temperature": 0}
        ranks = [one.pid for one in rank_processes() if one not in others]
        os.kill(ranks[1], signal.SIGKILL)  # those of the engine that was made first come first
        for room in (5, 6):
            with pytest.raises(RuntimeFault, match="rank 1 of the model's process was killed by SIGKILL"):
                pair.prefill.generate("Hello", params, bootstrap_room=room, **pair.at)
        with pytest.raises(TransferLate, match="within 10 s"):
            pair.decode.generate("Hello", params, bootstrap_room=6, **pair.at)
        assert pair.decode.generate("Hello", params).output_ids, "what needs no other engine goes on"
    finally:
        pair.close()
