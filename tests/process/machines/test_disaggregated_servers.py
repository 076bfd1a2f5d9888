"""Prefill and decode servers in processes of their own, against one engine that does both: the same answers;
and what becomes of requests when one of the two is killed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from runtime.api import Engine
from tests.exploring import SLOW_EXAMPLES
from tests.process.conftest import Served
from tests.process.patience import PATIENCE_S, until
from tests.unit.runtime.api.conftest import CHATML, write_tokenizer
from tests.unit.runtime.disagg.asked import differences, merged, request, without_room
from tests.unit.runtime.disagg.test_engine_pair import asked

AT_ONCE = 48
"""Requests in hand: less than a tenth of what the pool has room for."""
ALIKE = ("--dtype", "float32", "--device", "cpu", "--log-level", "warning")


class Pair:
    """Both servers. Nothing of them outlives the test."""

    def __init__(self, folder: Path, backend: str, *arguments: str) -> None:
        if backend == "nixl":
            pytest.importorskip("nixl")
        arguments = ("--disaggregation-transfer-backend", backend, *arguments)
        self.folder, self.arguments, self.count = folder, arguments, 0
        self.servers: list[Served] = []
        self.prefill = self.start("prefill", "0")
        self.decode = self.start("decode")
        self.prefill.wait_ready()
        self.decode.wait_ready()
        host, _, port = self.state(self.prefill)["bootstrap"].rpartition(":")
        self.at = {"bootstrap_host": host, "bootstrap_port": int(port)}

    def start(self, mode: str, port: str = "8998") -> Served:
        self.count += 1
        folder = self.folder / f"{mode}{self.count}"
        folder.mkdir()
        made = Served(
            folder, *ALIKE, "--disaggregation-mode", mode, "--disaggregation-bootstrap-port", port,
            "--disaggregation-heartbeat-s", "1", *self.arguments,
        )  # fmt: skip
        self.servers.append(made)
        return made

    def state(self, server: Served) -> dict[str, Any]:
        told = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()
        state: dict[str, Any] = told["internal_states"][0]
        return state

    def check_empty(self) -> None:
        for server in (self.prefill, self.decode):

            def full(server: Served = server) -> bool:
                httpx.post(f"{server.url}/flush_cache", json={}, timeout=PATIENCE_S)
                state = self.state(server)
                return bool(state["free"] == state["slots"] and state["num_free_metadata_rows"] == 512)

            until(full, lambda server=server: self.state(server))  # type: ignore[misc]

    def kill(self) -> None:
        for server in self.servers:
            server.kill()


async def answers(client: httpx.AsyncClient, url: str, fields: dict[str, Any]) -> list[dict[str, Any]]:
    told = await client.post(f"{url}/generate", json=fields)
    body = told.json()
    if told.status_code != 200:
        raise RuntimeError(f"{told.status_code}: {body['error']['message']}")
    return body if isinstance(body, list) else [body]


async def compare(alone: Engine, pair: Pair, requests: list[dict[str, Any]]) -> list[Any]:
    places = asyncio.Semaphore(AT_ONCE)
    async with httpx.AsyncClient(timeout=600.0, limits=httpx.Limits(max_connections=200)) as client:

        async def one(fields: dict[str, Any]) -> list[Any]:
            async with places:
                whole, first, second = await asyncio.gather(
                    asked(alone, without_room(fields)),
                    answers(client, pair.prefill.url, fields),
                    answers(client, pair.decode.url, fields),
                )
            parts = zip(whole, first, second, strict=True)
            return [(fields, wrong) for one, a, b in parts if (wrong := differences(one, merged(a, b)))]

        return [found for each in await asyncio.gather(*map(one, requests)) for found in each]


def check(alone: Engine, pair: Pair, requests: list[dict[str, Any]]) -> None:
    found = asyncio.run(compare(alone, pair, requests))
    # A draw, or two logits, may be nearer to each other than rounding: then nothing else may run beside.
    assert len(found) <= len(requests) // 100, found
    for fields, _ in found:
        fields["bootstrap_room"] += 1_000_000
        assert asyncio.run(compare(alone, pair, [fields])) == []


@pytest.mark.parametrize(
    ("backend", "page", "count"),
    [
        ("tcp", 16, 20),
        *(
            pytest.param(backend, page, SLOW_EXAMPLES, marks=[pytest.mark.slow, pytest.mark.timeout(900)])
            for backend in ("local", "tcp", "nixl")
            for page in (1, 16, 64)
        ),
    ],
)
def test_two_servers_answer_as_one(
    engine: Engine, tmp_path: Path, backend: str, page: int, count: int
) -> None:
    pair = Pair(
        tmp_path, backend, "--page-size", str(page),
        "--chunked-prefill-size", "64",
    )  # fmt: skip
    try:
        dice = random.Random(page * count)
        requests = [request(dice, 1 + 10 * number, pair.at) for number in range(count)]
        check(engine, pair, requests)
        assert pair.state(pair.decode)["num_transferred_requests_total"] >= count
        pair.check_empty()
    finally:
        pair.kill()


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


@pytest.mark.slow
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


@pytest.mark.slow
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
        assert await compare(alone, pair, again) == []
    assert failed
    print(f"{right} right, {failed} failed")
