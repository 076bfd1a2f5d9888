"""What liveness costs: `python benchmarks/liveness.py`.

The same constrained requests on the bundled checkpoint, with liveness on and off in turn, in one process.
Prints CPU seconds per output token of each, their ratio (on / off; medians of the rounds, tokens counted as
they came), how many outputs parse, and how many were led to their end. The budgets: ample (most outputs end
by themselves) and tight (a few tokens more than the shortest whole output that was found).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from runtime.api import Engine  # noqa: E402
from runtime.protocol.io_struct import GenerateReqInput  # noqa: E402

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "tags"],
}
UNIQUE = {"type": "array", "items": {"type": "string", "maxLength": 12}, "uniqueItems": True, "minItems": 2}
LOADS: dict[str, tuple[dict[str, Any], int]] = {
    "person, ample": ({"json_schema": json.dumps(PERSON)}, 200),
    "person, tight": ({"json_schema": json.dumps(PERSON)}, 28),
    "unique items, ample": ({"json_schema": json.dumps(UNIQUE)}, 120),
    "unique items, tight": ({"json_schema": json.dumps(UNIQUE)}, 20),
    "regex, tight": ({"regex": r"([a-z]{2,9} ){3,40}end"}, 40),
}
"""name -> constraint, max_new_tokens."""


def run(engine: Engine, load: str, count: int, stream: bool) -> tuple[float, int, int, int]:
    """(CPU seconds, output tokens, outputs that are whole, outputs led to their end) of one round."""
    constraint, most = LOADS[load]

    def request(number: int) -> GenerateReqInput:
        params = {**constraint, "max_new_tokens": most, "temperature": 1.0, "seed": number}
        return GenerateReqInput(text=f"Record {number}: ", sampling_params=params, stream=stream)

    async def one(number: int) -> Any:
        if not stream:
            return await engine.submit(request(number))
        async for event in engine.stream(request(number)):
            last = event
        return last

    async def every() -> list[Any]:
        return await asyncio.gather(*(one(number) for number in range(count)))

    engine.flush_cache()
    began = time.process_time()
    answers = asyncio.run(every())
    seconds = time.process_time() - began
    tokens = sum(len(answer.output_ids) for answer in answers)
    whole = sum(answer.meta["finish_reason"].get("unfinished") is None for answer in answers)
    closed = sum(bool(answer.meta["grammar"]["closed_by_budget"]) for answer in answers)
    return seconds, tokens, whole, closed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--stream", action="store_true")
    args = parser.parse_args()
    print(f"# {platform.machine()}, Python {platform.python_version()}, {args.requests} requests at once,"
          f" {args.rounds} rounds in turn, stream={args.stream}")  # fmt: skip
    print("| load | on: ms a token | off: ms a token | on / off | whole on / off | led to an end | of |")
    print("|---|---|---|---|---|---|---|")
    engines = {on: Engine("pocket", max_total_tokens=16384, liveness=on) for on in (True, False)}
    try:
        for load in LOADS:
            cost: dict[bool, list[float]] = {True: [], False: []}
            told: dict[bool, tuple[int, int]] = {}
            for number in range(args.rounds + 1):
                for on in (True, False):
                    seconds, tokens, whole, closed = run(engines[on], load, args.requests, args.stream)
                    told[on] = whole, closed
                    if number:  # the first round compiles
                        cost[on].append(1000 * seconds / tokens)
            on, off = statistics.median(cost[True]), statistics.median(cost[False])
            print(f"| {load} | {on:.2f} | {off:.2f} | {on / off:.2f} | {told[True][0]} / {told[False][0]} "
                  f"| {told[True][1]} | {args.requests} |", flush=True)  # fmt: skip
    finally:
        for engine in engines.values():
            engine.close()


if __name__ == "__main__":
    main()
