"""Long prompts beside running decodes: what they cost the others' tokens, with two engines that each do both,
and with one for prompts and one for outputs: `python -m benchmarks.serving.disaggregation`.

Both ways have the same two servers' processes, each with one thread for the model, and the same requests:
some streams are under way at a time, and every so often a long prompt comes. Told of the streams: the times
between two tokens; of all: tokens per second, and the long prompts' times to their first token. Rounds take
turns.

    python -m benchmarks.serving.disaggregation --write     # into benchmarks/results
    python -m benchmarks.serving.disaggregation --quick     # one short round of each: does it run?
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.measuring import HERE, conditions, keep
from benchmarks.workloads import VOCAB, make_model
from sglang_dsl import Runtime

WAIT_S = 600.0


@dataclass(frozen=True)
class Load:
    """streams: under way at a time, each of so many tokens; every_s: seconds between two long prompts, of so
    many tokens and with so many new ones; seconds: how long a round lasts."""

    streams: int = 6
    stream_prompt: int = 32
    stream_tokens: int = 96
    every_s: float = 4.0
    long_prompt: int = 1024
    long_tokens: int = 8
    seconds: float = 60.0
    vocab: int = VOCAB


@dataclass
class Round:
    """gaps: seconds between two tokens of a stream; first: until a long prompt's first token; tokens: all."""

    gaps: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0


@contextlib.contextmanager
def servers(way: str, model: str, options: dict[str, Any]) -> Iterator[list[Runtime]]:
    common = {
        "max_total_tokens": 16384, "threads": 1, "dtype": "float32", "incremental_streaming": True, **options,
    }  # fmt: skip
    kinds: list[dict[str, Any]] = [{}, {}]
    if way == "split":
        kinds = [
            {"disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 0},
            {"disaggregation_mode": "decode"},
        ]
    with contextlib.ExitStack() as stack:
        made = []
        for kind in kinds:
            made.append(Runtime(model, **common, **kind))
            stack.callback(made[-1].shutdown)
        yield made


class Way:
    """Sends a request as its servers want it."""

    def __init__(
        self, client: httpx.AsyncClient, made: list[Runtime], way: str, load: Load, seed: int
    ) -> None:
        self._vocab = load.vocab
        self._client, self._urls, self._split = client, [one.url for one in made], way == "split"
        self._dice = random.Random(seed)
        self._turns = itertools.cycle(self._urls)
        self._at: dict[str, Any] = {}

    async def find(self) -> None:
        if self._split:
            told = (await self._client.get(f"{self._urls[0]}/server_info")).json()
            host, _, port = told["internal_states"][0]["bootstrap"].rpartition(":")
            self._at = {"bootstrap_host": host, "bootstrap_port": int(port)}

    async def tokens(self, prompt: int, new: int) -> AsyncIterator[float]:
        """When each token came."""
        body: dict[str, Any] = {
            "input_ids": [self._dice.randrange(256, self._vocab) for _ in range(prompt)],
            "sampling_params": {"max_new_tokens": new, "temperature": 0.0, "ignore_eos": True},
        }
        other: asyncio.Task[httpx.Response] | None = None
        url = next(self._turns)
        if self._split:
            body |= {"bootstrap_room": self._dice.randrange(1, 1 << 62), **self._at}
            other = asyncio.create_task(self._client.post(f"{self._urls[0]}/generate", json=body))
            url = self._urls[1]
        async with self._client.stream("POST", f"{url}/generate", json={**body, "stream": True}) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for _ in json.loads(line[6:])["output_ids"]:
                        yield time.perf_counter()
        if other is not None:
            (await other).raise_for_status()


async def measure(made: list[Runtime], way: str, load: Load, seed: int) -> Round:
    found = Round()
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(timeout=WAIT_S, limits=limits) as client:
        sends = Way(client, made, way, load, seed)
        await sends.find()
        async for _ in sends.tokens(64, 4):
            pass  # whatever happens once, such as two engines that meet
        until = time.perf_counter() + load.seconds

        async def stream() -> None:
            while time.perf_counter() < until:
                before = 0.0
                async for now in sends.tokens(load.stream_prompt, load.stream_tokens):
                    if before:
                        found.gaps.append(now - before)
                    before = now
                    found.tokens += now < until

        async def prompt() -> None:
            began, first = time.perf_counter(), 0.0
            async for now in sends.tokens(load.long_prompt, load.long_tokens):
                first = first or now - began
                found.tokens += now < until
            found.first.append(first)

        async def prompts() -> None:
            tasks = []
            while time.perf_counter() < until:
                await asyncio.sleep(load.every_s)
                tasks.append(asyncio.create_task(prompt()))
            await asyncio.gather(*tasks)

        outcomes = await asyncio.gather(
            prompts(), *(stream() for _ in range(load.streams)), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                found.failed += 1
                print(f"failed: {outcome!r}", file=sys.stderr)
    return found


def report(ways: dict[str, list[Round]], load: Load) -> str:
    head = (
        "| way | tokens' gaps, p50 ms | p95 | p99 | longest | tokens/s | long prompts' first token, p50 s | "
        "p95 | failed |"
    )
    lines = [head, "|---" * 9 + "|"]
    for name, rounds in ways.items():
        gaps = sorted(gap for one in rounds for gap in one.gaps)
        first = sorted(gap for one in rounds for gap in one.first)
        rate = statistics.median(one.tokens / load.seconds for one in rounds)
        cells = [
            *(f"{1000 * share(gaps, part):.0f}" for part in (0.5, 0.95, 0.99, 1.0)),
            f"{rate:.0f}",
            *(f"{share(first, part):.2f}" for part in (0.5, 0.95)),
            str(sum(one.failed for one in rounds)),
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def share(values: list[float], part: float) -> float:
    return values[min(len(values) - 1, int(part * len(values)))] if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=Load.seconds)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--backend", default="local", help="how the KV moves: local or tcp")
    given = parser.parse_args()
    load = Load(seconds=given.seconds)
    model = str(make_model(HERE / ".cache" / "llama-40m")) if not given.quick else "pocket"
    rounds = 1 if given.quick else given.rounds
    if given.quick:
        load = Load(2, 8, 8, 0.5, 64, 2, 2.0, vocab=1000)
    names = {
        "two that do both": ("both", {}),
        "the same, prompts in chunks of 256": ("both", {"chunked_prefill_size": 256}),
        "one for prompts, one for outputs": ("split", {"disaggregation_transfer_backend": given.backend}),
    }
    found: dict[str, list[Round]] = {name: [] for name in names}
    for number in range(rounds):
        for name in reversed(names) if number % 2 else names:
            way, options = names[name]
            with servers(way, model, options) as made:
                found[name].append(asyncio.run(measure(made, way, load, number)))
            print(name, "done", file=sys.stderr)
    text = "\n\n".join(
        [
            "# Long prompts beside running decodes",
            conditions(
                f"{Path(model).name}, {load.streams} streams of {load.stream_tokens} tokens at a time, a "
                f"prompt of {load.long_prompt} tokens every {load.every_s:g} s, "
                f"{rounds} rounds of {load.seconds:g} s, "
                f"two servers with one thread for the model each, KV moved by {given.backend}"
            ),
            report(found, load),
        ]
    )
    print(text)
    if given.write:
        print(keep("disaggregation", text))


if __name__ == "__main__":
    main()
