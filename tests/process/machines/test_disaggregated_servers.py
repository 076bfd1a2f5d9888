"""Prefill and decode servers in processes of their own, against one engine that does both: the same answers;
and what becomes of requests when one of the two is killed."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from runtime.api import Engine
from tests.process.conftest import Served
from tests.process.patience import PATIENCE_S, until
from tests.process.runtime.disagg.test_engine_pair import asked
from tests.unit.runtime.disagg.asked import differences, merged, request, without_room

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

    def logs(self) -> str:
        """The ends of what the servers wrote, for a test that fails."""
        return "\n".join(f"{server.url}:\n{server.log[-2000:]}" for server in self.servers)


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
    [("tcp", 16, 20)],
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
