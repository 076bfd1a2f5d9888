"""A server of two HTTP workers under mixed load for a long time: every valid request is answered once, every
invalid one refused with a reason, whoever leaves takes the request along, the counters are right, and nothing
grows.

    pytest -s tests/long/server/test_soak.py     # SOAK_REQUESTS: 5,000 of them; prints figures
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import random
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.exploring import EXPLORE
from tests.long.server.traffic import Case, Draw
from tests.process.patience import PATIENCE_S, metrics, until

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "5000"))
AT_ONCE = 64
LONGEST_S = PATIENCE_S
"""How long one request may take, whatever happens."""
LOOK = 20
"""Requests between two looks at the server's memory."""
MIB = 1 << 20
CONTEXT = 2048
"""Tokens a request of the bundled model may have."""
GROWTH_MIB = 32.0
"""How much more memory a process may hold at the end than after the warm-up: a size of batch that comes late
makes oneDNN keep a few MiB more. What leaks per request or per batch is hundreds by then."""


@dataclasses.dataclass
class Tally:
    """What the client saw. left: requests in the engine of clients that went after news of them, and
    unsure: of those who may have gone before anybody read what they wanted. Either may have been at its end
    before the server saw its client go. left_tokens: how many they would have made at most, prompts
    included."""

    failures: list[str] = dataclasses.field(default_factory=list)
    answered: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    by_path: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    by_status: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seconds: list[float] = dataclasses.field(default_factory=list)
    items: int = 0
    left: int = 0
    unsure: int = 0
    left_tokens: int = 0
    unsure_paths: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    done: int = 0


async def go(client: httpx.AsyncClient, case: Case, tally: Tally, dice: random.Random) -> None:
    """Send one request and see to its end. What is wrong becomes one of tally.failures."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(LONGEST_S):
            if case.leaves:
                await leave(client, case, tally, dice)
            else:
                await ask(client, case, tally)
                tally.seconds.append(time.monotonic() - began)
    except Exception as error:  # noqa: BLE001 - told at the end, with all others
        tally.failures.append(f"{case.name}: {type(error).__name__}: {error!s:.500}: {case.body!s:.300}")
    finally:
        tally.done += 1
        tally.by_path[case.path] += 1


def request_of(client: httpx.AsyncClient, case: Case) -> httpx.Request:
    content = case.body if isinstance(case.body, bytes) else json.dumps(case.body).encode()
    return client.build_request(case.method, case.path, content=content, headers=case.headers)


async def ask(client: httpx.AsyncClient, case: Case, tally: Tally) -> None:
    answer = await client.send(request_of(client, case))
    tally.by_status[f"{case.path} {answer.status_code}"] += 1
    assert answer.status_code == case.status, f"{answer.status_code} {answer.text[:300]}"
    if case.status != 200:
        error = answer.json()["error"]
        assert len(error["message"]) > 10
        assert case.says in f"{error['message']} {error.get('param')}", error
        assert error["type"]
        tally.answered["refused"] += 1
        return
    found = events_of(answer.text) if case.stream else answer.json()
    prompt_tokens, completion_tokens = case.check(found)
    tally.answered[case.name + (" (streamed)" if case.stream else "")] += 1
    tally.items += case.items
    tally.prompt_tokens += prompt_tokens
    tally.completion_tokens += completion_tokens


def events_of(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


async def leave(client: httpx.AsyncClient, case: Case, tally: Tally, dice: random.Random) -> None:
    """Go away after some events, or after some time; or with the answer, where that is there when this
    process looks again."""
    tally.answered["left midway"] += 1
    if case.stream:
        async with contextlib.aclosing(_lines(client, case)) as lines:
            for _ in range(dice.randint(1, 12)):
                line = await anext(lines)
                assert line.startswith(("data: {", "data: [DONE]"))
                if line == "data: [DONE]":
                    break
        tally.left += case.items
    else:
        sending = asyncio.create_task(client.send(request_of(client, case)))
        await asyncio.wait({sending}, timeout=dice.uniform(0.02, 0.6))
        if not sending.cancel():
            assert sending.result().status_code == 200, sending.result().text[:300]
        await asyncio.gather(sending, return_exceptions=True)
        tally.unsure += case.items
        tally.unsure_paths[case.path] += 1
    tally.left_tokens += case.items * CONTEXT


async def _lines(client: httpx.AsyncClient, case: Case) -> AsyncGenerator[str, None]:
    answer = await client.send(request_of(client, case), stream=True)
    try:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                yield line
    finally:
        await answer.aclose()


async def run(url: str, cases: Iterator[Case], watch: Callable[[int], None]) -> Tally:
    """AT_ONCE clients that take one case after the other."""
    tally, dice = Tally(), random.Random(1)
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=AT_ONCE)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=LONGEST_S) as client:

        async def work() -> None:
            for case in cases:
                await go(client, case, tally, dice)
                if tally.done % LOOK == 0:
                    watch(tally.done)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return tally


# -- the server ---------------------------------------------------------------------------------------------


class Memory:
    """Resident memory, descriptors and threads of the server's processes, as the load goes on."""

    def __init__(self, processes: dict[str, psutil.Process]) -> None:
        self._processes = processes
        self.rows: list[tuple[int, dict[str, float]]] = []
        self._threads: list[tuple[int, dict[str, int]]] = []

    def look(self, done: int) -> None:
        found = {name: one.memory_info().rss / MIB for name, one in self._processes.items()}
        self.rows.append((done, found))
        self._threads.append((done, {name: one.num_threads() for name, one in self._processes.items()}))

    def held(self) -> dict[str, tuple[int, int]]:
        """Descriptors and threads."""
        return {name: (one.num_fds(), one.num_threads()) for name, one in self._processes.items()}

    def pools(self, share: float) -> dict[str, int]:
        """The most threads up to that share of the way: pools begin theirs when they are first needed."""
        most = share * self.rows[-1][0]
        return {
            name: max(row[name] for done, row in self._threads if done <= most) for name in self._processes
        }

    def around(self, share: float) -> dict[str, float]:
        """The median about that share of the way."""
        last = self.rows[-1][0]
        near = [row for done, row in self.rows if abs(done - share * last) <= 0.05 * last]
        return {name: statistics.median(row[name] for row in near) for name in self._processes}


def counters(url: str) -> dict[str, float]:
    """What /metrics says, the label of the model aside."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics(url)):
        for sample in family.samples:
            parts = [sample.labels[name] for name in ("endpoint", "status_code") if name in sample.labels]
            name = " ".join([sample.name.removeprefix("sglang_dsl:"), *parts])
            found[name] = found.get(name, 0.0) + sample.value
    return found


def check_counters(tally: Tally, now: dict[str, float]) -> None:
    """The server's counts are those of the client."""
    for path, count in tally.by_path.items():
        counted = now[f"http_requests_total {path if path != '/generates' else 'other'}"]
        assert count - tally.unsure_paths[path] <= counted <= count, (path, counted, count)
    for name, count in tally.by_status.items():
        path, status = name.split(" ")
        counted = now[f"http_responses_total {path if path != '/generates' else 'other'} {status}"]
        # Those who left a stream have got their status before.
        assert count <= counted <= count + tally.answered["left midway"], (name, counted, count)
    aborted, failed = now["num_aborted_requests_total"], now["num_failed_requests_total"]
    finished = now["num_requests_total"] - aborted - failed
    too_quick = finished - tally.items  # of those whose clients went
    assert too_quick >= 0, (too_quick, tally)
    # Some may have ended while this process stood still, but what clients leave is cut short.
    assert too_quick <= (tally.left + tally.unsure) / 2, (too_quick, tally)
    assert tally.left <= aborted + too_quick <= tally.left + tally.unsure, (aborted, too_quick, tally)
    assert failed <= tally.answered["refused"]
    most = tally.left_tokens if too_quick else 0
    assert tally.prompt_tokens <= now["prompt_tokens_total"] <= tally.prompt_tokens + most
    assert tally.completion_tokens <= now["generation_tokens_total"] <= tally.completion_tokens + most
    assert now["http_requests_active"] == 1  # the scrape


def report(tally: Tally, memory: Memory, seconds: float, now: dict[str, float]) -> str:
    lines = [f"{tally.done} requests in {seconds:.0f} s ({tally.done / seconds:.0f}/s), {AT_ONCE} at once"]
    lines += [f"  {name}: {count}" for name, count in sorted(tally.answered.items())]
    known = sorted(tally.seconds)
    shares = ((0.5, "median"), (0.99, "99 %"), (1.0, "longest"))
    said = (f"{name} {known[min(len(known) - 1, int(share * len(known)))]:.2f} s" for share, name in shares)
    lines.append("  latency: " + ", ".join(said))
    for name in ("num_requests_total", "num_aborted_requests_total", "num_failed_requests_total",
                 "prompt_tokens_total", "cached_tokens_total", "generation_tokens_total",
                 "num_retractions_total", "num_repairs_total"):  # fmt: skip
        lines.append(f"  {name}: {now[name]:.0f}")
    shares_seen = (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0)
    lines.append("  MiB at " + ", ".join(f"{share:.0%}" for share in shares_seen))
    for name in memory.rows[0][1]:
        held = ", ".join(f"{memory.around(share)[name]:.1f}" for share in shares_seen)
        lines.append(f"    {name}: {held}")
    return "\n".join(lines)


@pytest.mark.timeout(3600)
def test_mixed_load_leaves_nothing_behind(
    start_server: Callable[..., Any], wait_idle: Callable[..., None]
) -> None:
    count = REQUESTS
    server = start_server("--log-level", "warning", "--http-workers", "2").wait_ready()
    memory = Memory({"supervisor": psutil.Process(server.process.pid), **server.children()})
    httpx.get(f"{server.url}/health", timeout=PATIENCE_S).raise_for_status()
    before, began, draw = memory.held(), time.monotonic(), Draw(EXPLORE + count)
    tally = asyncio.run(run(server.url, (draw.case() for _ in range(count)), memory.look))
    seconds = time.monotonic() - began
    wait_idle(server)
    now = counters(server.url)
    print(report(tally, memory, seconds, now))
    assert not tally.failures, "\n".join(tally.failures[:20])
    assert tally.done == count
    check_counters(tally, now)
    assert now["num_repairs_total"] == 0
    assert httpx.post(f"{server.url}/flush_cache", json={}, timeout=PATIENCE_S).status_code == 200
    state = httpx.get(f"{server.url}/server_info", timeout=PATIENCE_S).json()["internal_states"][0]
    assert state["free"] == state["slots"]
    assert state["running"] == state["waiting"] == state["compiling"] == state["live"] == 0

    threads_before = memory.pools(0.25)

    def few_are_left() -> bool:
        return all(
            files <= before[name][0] + 8 and threads <= threads_before[name] + 2
            for name, (files, threads) in memory.held().items()
        )

    until(few_are_left, lambda: (before, threads_before, memory.held()))
    if count > 1000:
        warm, end = memory.around(0.4), memory.around(1.0)
        assert all(end[name] - warm[name] < GROWTH_MIB for name in end), (warm, end)
    assert server.end() == 0
    assert "Traceback" not in server.log, server.log
