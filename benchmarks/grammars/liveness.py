"""What liveness costs: `python -m benchmarks.grammars.liveness`.

The same constrained requests on the bundled checkpoint, with liveness on and off in turn, in one run. Prints
CPU milliseconds (of all processes) per output token of each, the ratio on / off (median of the rounds), how
many outputs parse, and how many were led to an end. The budgets: ample (most outputs end by themselves) and
tight (a few tokens more than the shortest whole output that was found).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from functools import partial
from typing import Any

from benchmarks.measuring import conditions, in_turn, keep
from runtime.api import Engine
from runtime.protocol.io_struct import GenerateReqInput

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


def run(engine: Engine, load: str, count: int, stream: bool) -> tuple[int, int, int]:
    """(output tokens, outputs that are whole, outputs led to their end) of one round."""
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
    answers = asyncio.run(every())
    tokens = sum(len(answer.output_ids) for answer in answers)
    whole = sum(answer.meta["finish_reason"].get("unfinished") is None for answer in answers)
    closed = sum(bool(answer.meta["grammar"]["closed_by_budget"]) for answer in answers)
    return tokens, whole, closed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--only", default="", help="run only loads whose name contains this")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-liveness.md")
    parser.add_argument("--append", action="store_true", help="write behind what the day's file has")
    args = parser.parse_args()
    lines = [
        "| load | on: ms a token | off: ms a token | on / off | whole on / off | led to an end | of |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines))
    engines = {
        name: Engine("pocket", max_total_tokens=16384, threads=1, liveness=name == "on")
        for name in ("on", "off")
    }
    try:
        for load in LOADS:
            if args.only not in load:
                continue
            ways = {
                name: partial(run, engine, load, args.requests, args.stream)
                for name, engine in engines.items()
            }
            in_turn(ways, 1)  # compiles
            took, gave = in_turn(ways, args.rounds)
            each = {
                name: [
                    1000 * one.cpu / tokens
                    for one, (tokens, _, _) in zip(took[name], gave[name], strict=True)
                ]
                for name in ways
            }
            on, off = statistics.median(each["on"]), statistics.median(each["off"])
            gain = statistics.median(a / b for a, b in zip(each["on"], each["off"], strict=True))
            lines.append(
                f"| {load} | {on:.2f} | {off:.2f} | {gain:.2f} | {gave['on'][-1][1]} / {gave['off'][-1][1]} "
                f"| {gave['on'][-1][2]} | {args.requests} |"
            )
            print(lines[-1], flush=True)
    finally:
        for engine in engines.values():
            engine.close()
    where = conditions(
        f"1 thread, {args.requests} requests at once, {'streamed' if args.stream else 'whole'}, medians of "
        f"{args.rounds} rounds, on and off in turn"
    )
    print(where)
    if args.write:
        text = "\n".join([f"# What liveness costs\n\n{where}. {EXPLAINED}\n", *lines])
        keep("liveness", text, append=args.append)


EXPLAINED = """\
CPU milliseconds of all processes per output token. Whole: outputs that their constraint accepts. Led to an
end: outputs that were closed before max_new_tokens ran out. The requests are not the same work on both sides:
with liveness on an output ends where it is closed, off it runs to the end of its budget and breaks off there;
hence costs per token, not per request."""


if __name__ == "__main__":
    main()
