"""Two engines on the bundled checkpoint, prompts in the one and outputs in the other, against one that does
both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import pytest

from runtime.api import Engine
from runtime.protocol.errors import Aborted, BadRequest, RuntimeFault
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput
from tests.unit.runtime.disagg.asked import differences, merged, request, without_room

SMALL = {"dtype": "float32", "device": "cpu", "threads": 1, "max_total_tokens": 8192, "runner_process": False}


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    with Engine("pocket", **SMALL) as engine:
        yield engine


class Pair:
    def __init__(self, backend: str, **options: Any) -> None:
        options = {**SMALL, "disaggregation_transfer_backend": backend, **options}
        self.prefill = Engine(
            "pocket", disaggregation_mode="prefill", disaggregation_bootstrap_port=0, **options
        )
        try:
            self.decode = Engine("pocket", disaggregation_mode="decode", **options)
        except BaseException:
            self.prefill.close()
            raise
        host, _, port = self.prefill.state()["bootstrap"].rpartition(":")
        self.at = {"bootstrap_host": host, "bootstrap_port": int(port)}

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def check_empty(self, rows: int = 512) -> None:
        for engine in (self.prefill, self.decode):
            assert engine.flush_cache()
            state = engine.state()
            assert state["free"] == state["slots"]
            assert state["num_free_metadata_rows"] == rows
            assert not state.get("num_host_copies")
            assert not state["num_repairs_total"]


async def asked(engine: Engine, fields: dict[str, Any]) -> list[dict[str, Any]]:
    request = GenerateReqInput(**fields)
    if fields["sampling_params"].get("n", 1) > 1:
        return [plain(one) for one in await engine.submit_batch(request)]
    return [plain(await engine.submit(request))]


def plain(outcome: GenerateOutput | RuntimeFault) -> dict[str, Any]:
    if isinstance(outcome, RuntimeFault):
        raise outcome
    return {"text": outcome.text, "output_ids": outcome.output_ids, "meta_info": outcome.meta}


async def compare(alone: Engine, pair: Pair, requests: list[dict[str, Any]]) -> list[Any]:
    async def one(fields: dict[str, Any]) -> list[Any]:
        answers = await asyncio.gather(
            asked(alone, without_room(fields)), asked(pair.prefill, fields), asked(pair.decode, fields)
        )
        wrong = [
            differences(whole, merged(first, second)) for whole, first, second in zip(*answers, strict=True)
        ]
        return [(fields, found) for found in wrong if found]

    return [found for each in await asyncio.gather(*map(one, requests)) for found in each]


@pytest.mark.parametrize("page", [16])
def test_the_same_answers_as_of_one_engine(alone: Engine, page: int) -> None:
    pair = Pair("local", page_size=page, chunked_prefill_size=64)
    try:
        dice = random.Random(page)
        requests = [request(dice, 1 + 10 * number, pair.at) for number in range(40)]
        assert asyncio.run(compare(alone, pair, requests)) == []
        assert pair.decode.state()["num_transferred_requests_total"] >= 40
        assert pair.decode.state()["computed_tokens_total"] < alone.state()["computed_tokens_total"] / 2
        pair.check_empty()
        refusals(pair)
        asyncio.run(alone_in_the_room(pair, 1_000_000))
        pair.check_empty()
    finally:
        pair.close()


def refusals(pair: Pair) -> None:
    fields = {"sampling_params": {"max_new_tokens": 2}, "bootstrap_room": 9, **pair.at}
    for engine in (pair.prefill, pair.decode):
        with pytest.raises(BadRequest, match="states"):
            engine.generate("a", return_hidden_states=True, **fields)
        with pytest.raises(BadRequest, match="session"):
            engine.generate("a", session_id="s", **fields)
        # What needs no other engine needs no room.
        assert engine.generate("Hello", {"max_new_tokens": 3, "temperature": 0}).output_ids
    with pytest.raises(BadRequest, match="allowed"):
        pair.decode.generate("a", **{**fields, "bootstrap_host": "10.1.2.3"})


async def alone_in_the_room(pair: Pair, room: int) -> None:
    """What ends on one side before the other has heard of it is known there at once, with the cause."""
    sides = (pair.prefill, pair.decode)
    for number, (first, second) in enumerate([sides, sides[::-1]]):
        fields = {"text": "a", "sampling_params": {}, "bootstrap_room": room + number, **pair.at}
        ended = asyncio.create_task(first.submit(GenerateReqInput(rid="gone", **fields)))
        while not await asyncio.to_thread(waiting, first):
            await asyncio.sleep(0.01)
        first.abort("gone")
        with pytest.raises(Aborted):
            await ended
        with pytest.raises(RuntimeFault, match="cancelled"):
            await asyncio.wait_for(second.submit(GenerateReqInput(**fields)), 100)


def waiting(engine: Engine) -> bool:
    state = engine.state()
    return any(state.get(f"num_{name}_queue_reqs") for name in ("prefill_bootstrap", "decode_transfer"))


def test_an_engine_that_does_both_refuses_a_room(alone: Engine) -> None:
    with pytest.raises(BadRequest, match="computes both"):
        alone.generate("a", bootstrap_host="127.0.0.1", bootstrap_room=3)
