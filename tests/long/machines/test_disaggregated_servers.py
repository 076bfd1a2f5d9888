"""process/machines/test_disaggregated_servers.py, at length."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.api import Engine
from tests.exploring import SLOW_EXAMPLES
from tests.process.conftest import Served
from tests.process.machines.test_disaggregated_servers import Pair, answers, check, compare
from tests.process.machines.test_disaggregated_servers import test_two_servers_answer_as_one as check_two
from tests.process.runtime.api.conftest import CHATML, write_tokenizer
from tests.process.runtime.disagg.test_engine_pair import asked
from tests.unit.runtime.disagg.asked import differences, merged, request, without_room


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of 100 million parameters."""
    folder = tmp_path_factory.mktemp("large")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=384, hidden_size=768, intermediate_size=2048, num_hidden_layers=16,
        num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=2048, initializer_range=0.05,
        bos_token_id=None, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32)
    assert model.num_parameters() > 100_000_000
    model.save_pretrained(folder)
    write_tokenizer(folder, 380, chat_template=CHATML)
    return folder


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("backend", ["local", "tcp", "nixl"])
def test_two_servers_of_a_larger_model_answer_as_one(large: Path, tmp_path: Path, backend: str) -> None:
    pair = Pair(
        tmp_path, backend, "--page-size", "16", "--model", str(large),
        "--chunked-prefill-size", "64",
    )  # fmt: skip
    try:
        with Engine(str(large), max_total_tokens=8192, dtype="float32", device="cpu") as alone:
            dice = random.Random(7)
            requests = [request(dice, 1 + 10 * number, pair.at) for number in range(SLOW_EXAMPLES)]
            check(alone, pair, requests)
        assert pair.state(pair.decode)["num_transferred_requests_total"] >= SLOW_EXAMPLES
        pair.check_empty()
    finally:
        pair.kill()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["local", "tcp"])
def test_a_side_that_is_killed_is_an_error_and_a_new_one_serves(
    engine: Engine, tmp_path: Path, backend: str
) -> None:
    pair = Pair(tmp_path, backend, "--disaggregation-timeout-s", "60")
    try:
        dice = random.Random(4)
        asyncio.run(rounds(engine, pair, dice))
        pair.check_empty()
    finally:
        pair.kill()


async def rounds(alone: Engine, pair: Pair, dice: random.Random) -> None:
    """Requests in hand while a side is killed: each is answered rightly, or with an error; then a new one."""
    room = 1
    failed = right = 0
    limits = httpx.Limits(max_connections=200)
    for number, side in enumerate(["decode", "prefill", "decode", "prefill"]):
        async with httpx.AsyncClient(timeout=600.0, limits=limits) as client:
            requests = []
            for _ in range(60):
                room += 10
                requests.append(request(dice, room, pair.at))
            tasks = [
                asyncio.gather(
                    *(answers(client, one.url, fields) for one in (pair.prefill, pair.decode)),
                    return_exceptions=True,
                )
                for fields in requests
            ]
            await asyncio.sleep(dice.random())  # wherever they are by then
            victim: Served = getattr(pair, side)
            victim.children()
            victim.kill()
            for fields, both in zip(requests, await asyncio.gather(*tasks), strict=True):
                first, second = both
                if isinstance(first, BaseException) or isinstance(second, BaseException):
                    failed += 1
                    continue
                right += 1
                whole = await asked(alone, without_room(fields))
                parts = zip(whole, first, second, strict=True)
                assert [differences(one, merged(a, b)) for one, a, b in parts] == [[]] * len(whole)
        port = str(pair.at["bootstrap_port"])
        setattr(pair, side, pair.start(side, port).wait_ready())
        again = [request(dice, 100_000 + number * 1000 + 10 * one, pair.at) for one in range(10)]
        try:
            assert await compare(alone, pair, again) == []
        except httpx.TransportError as error:
            raise AssertionError(pair.logs()) from error
    assert failed
    print(f"{right} right, {failed} failed")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("backend", ["local", "tcp", "nixl"])
def test_two_servers_answer_as_one(engine: Engine, tmp_path: Path, backend: str, page: int) -> None:
    check_two(engine, tmp_path, backend, page, SLOW_EXAMPLES)
