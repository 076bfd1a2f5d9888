"""What does it bring to send a program's requests to the replica that has its prefix? Policies of the router,
before the same replicas.

    python -m benchmarks.serving.routing [--replicas 4] [--programs 8] [--requests 160] [--rounds 3] [--write]

Starts the replicas on pocket, and for each round of each policy a new router. Each round empties the caches
and asks all requests in one random order, the same for all policies: a program's long prefix, and a line of
its own. Prints, as medians of the rounds, the share of prompt tokens that came from the caches, requests per
second, CPU seconds of all processes, and the first token's latency. Two sizes of KV pools: one that holds a
few of the programs' prefixes, and one that holds all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.measuring import Reading, conditions, keep

PATIENCE_S = 300.0
POLICIES = ("round_robin", "power_of_two", "cache_aware")
SENTENCES = 55
"""Of a program's prefix; about 22 tokens of pocket each."""


class Round(NamedTuple):
    """hits: share of prompt tokens; rate: requests per second; first: median seconds to the first token."""

    hits: float
    rate: float
    cpu: float
    first: float
    prompt: float


class Started:
    """A command of the runtime on a free port. `url` once it is ready."""

    def __init__(self, command: str, *options: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="routing-")
        self._ready = Path(self._folder.name, "ready.json")
        line = [sys.executable, "-m", "runtime", command, "--port", "0", "--ready-file", str(self._ready)]
        self._process = subprocess.Popen(
            [*line, "--log-level", "warning", *options], stdin=subprocess.DEVNULL
        )

    @property
    def url(self) -> str:
        deadline = time.monotonic() + PATIENCE_S
        while not self._ready.is_file():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("it did not start")
            time.sleep(0.05)
        return str(json.loads(self._ready.read_text())["url"])

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)
        self._folder.cleanup()


@contextlib.contextmanager
def started(command: str, *options: str) -> Iterator[Started]:
    made = Started(command, *options)
    try:
        yield made
    finally:
        made.end()


def prefix(program: int) -> str:
    lines = (f"Rule {number} of book {program}: the river of Ostrel is Sarn." for number in range(SENTENCES))
    return f"This is program {program}.\n" + "\n".join(lines)


def requests_of(programs: int, count: int) -> list[str]:
    """Prompts: as many of each program, in one random order."""
    order = [number % programs for number in range(count)]
    random.Random(7).shuffle(order)
    return [f"{prefix(program)}\nQ: What is {number}?\nA:" for number, program in enumerate(order)]


async def ask_all(url: str, prompts: Sequence[str], at_once: int) -> list[dict[str, float]]:
    """The answers' meta_info."""
    places = asyncio.Semaphore(at_once)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def ask(prompt: str) -> dict[str, float]:
            async with places:
                body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 8}}
                answer = await client.post("/generate", json=body)
                answer.raise_for_status()
                meta: dict[str, float] = answer.json()["meta_info"]
                return meta

        return list(await asyncio.gather(*map(ask, prompts)))


def one_round(policy: str, workers: Sequence[str], prompts: Sequence[str], at_once: int) -> Round:
    with started("router", "--policy", policy, "--worker", *workers) as router:
        url = router.url
        while httpx.get(f"{url}/ready").status_code != 200:
            time.sleep(0.05)
        until_all(url, len(workers))
        httpx.post(f"{url}/flush_cache?timeout=60", json={}, timeout=PATIENCE_S).raise_for_status()
        began = Reading.now()
        metas = asyncio.run(ask_all(url, prompts, at_once))
        spent = began.since()
    tokens = sum(meta["prompt_tokens"] for meta in metas)
    return Round(
        sum(meta["cached_tokens"] for meta in metas) / tokens,
        len(prompts) / spent.wall,
        spent.cpu,
        statistics.median(meta["first_token_latency"] for meta in metas),
        tokens / len(metas),
    )


def until_all(url: str, count: int) -> None:
    """Wait until the router has found all workers."""
    deadline = time.monotonic() + PATIENCE_S
    while sum(one["state"] == "available" for one in httpx.get(f"{url}/workers").json()["workers"]) < count:
        if time.monotonic() > deadline:
            raise RuntimeError("not all workers became available")
        time.sleep(0.05)


def measure(words: argparse.Namespace, slots: int) -> list[str]:
    """Lines of a table."""
    prompts = requests_of(words.programs, words.requests)
    found: dict[str, list[Round]] = {policy: [] for policy in POLICIES}
    with contextlib.ExitStack() as stack:
        options = ("--threads", "1", "--max-total-tokens", str(slots))
        replicas = [stack.enter_context(started("serve", *options)) for _ in range(words.replicas)]
        workers = [one.url for one in replicas]
        asyncio.run(ask_all(workers[0], prompts[:1], 1))
        for number in range(words.rounds):
            for policy in POLICIES if number % 2 == 0 else reversed(POLICIES):
                found[policy].append(one_round(policy, workers, prompts, words.at_once))
    lines = []
    base = median_of(found["round_robin"])
    for policy, rounds in found.items():
        one = median_of(rounds)
        lines.append(
            f"| {slots} | {policy} | {one.hits:.1%} | {one.hits / base.hits:.2f} | {one.rate:.1f} "
            f"| {one.rate / base.rate:.2f} | {one.cpu:.1f} | {1000 * one.first:.0f} |"
        )
        print(lines[-1], flush=True)
    print(f"{base.prompt:.0f} tokens per prompt")
    return lines


def median_of(rounds: Sequence[Round]) -> Round:
    return Round(*(statistics.median(column) for column in zip(*rounds, strict=True)))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--replicas", type=int, default=4)
    asked.add_argument("--programs", type=int, default=8)
    asked.add_argument("--requests", type=int, default=160)
    asked.add_argument("--at-once", type=int, default=8)
    asked.add_argument("--rounds", type=int, default=3)
    asked.add_argument("--slots", type=int, nargs="+", default=[4096, 16384], help="KV slots of a replica")
    asked.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-routing.md")
    words = asked.parse_args()
    lines = [
        "| KV slots of each | policy | from the cache | times round robin's | requests/s "
        "| times round robin's | CPU s | first token, ms |",
        "|---" * 8 + "|",
    ]
    print("\n".join(lines))
    for slots in words.slots:
        lines += measure(words, slots)
    where = conditions(
        f"{words.replicas} replicas on pocket with one thread each, {words.programs} programs, "
        f"{words.requests} requests, {words.at_once} at once, medians of {words.rounds} rounds"
    )
    print(where)
    if words.write:
        keep("routing", "\n".join([f"# Router policies\n\n{where}.\n", *lines]))


if __name__ == "__main__":
    main()
