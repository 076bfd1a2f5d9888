"""Does it pay to commit what the items of a batch share before they run? The same batch with and without.

    python -m benchmarks.batch_prefix [--items 64 8 2] [--rounds 7]

Each round empties the prefix cache, runs the batch as it is, empties it again, commits the begin that all
prompts share (about 1,600 tokens of pocket), and runs the batch. Prints medians of wall and CPU seconds of
the whole, the commit included, their ratio, and how many prompt tokens were found in the cache.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import sglang_dsl as sgl
from sglang_dsl.backends.engine import EngineBackend

SHARED = " ".join(
    f"The capital of Ostrel is Belmar, its river is Sarn, and {n} is a number." for n in range(60)
)


@sgl.function(temperature=0, max_tokens=8)
def program(s: Any, number: int) -> None:
    s += sgl.user(SHARED + f" Question {number}: who are you?")
    s += sgl.assistant(sgl.gen("answer"))


def once(backend: EngineBackend, items: int, hoisted: bool) -> tuple[float, float, int]:
    """Wall seconds, CPU seconds, cached prompt tokens."""
    backend.flush_cache()
    wall, cpu = time.perf_counter(), time.process_time()
    if hoisted:
        program.cache(backend)
    states = program.run_batch([(number,) for number in range(items)], backend=backend)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall, cpu, sum(state.usage()["cached_tokens"] for state in states)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--items", type=int, nargs="+", default=[64, 8, 2])
    asked.add_argument("--rounds", type=int, default=7)
    words = asked.parse_args()
    backend = EngineBackend("pocket")
    try:
        for items in words.items:
            once(backend, items, False)
            rounds = [(once(backend, items, False), once(backend, items, True)) for _ in range(words.rounds)]
            plain, hoisted = ([median(column) for column in zip(*side)] for side in zip(*rounds))
            print(
                f"{items} items: as it is {plain[0]:.3f} s wall {plain[1]:.3f} s CPU {plain[2]:.0f} cached; "
                f"begin committed first {hoisted[0]:.3f} s wall {hoisted[1]:.3f} s CPU {hoisted[2]:.0f} "
                f"cached; ratio {hoisted[0] / plain[0]:.2f}"
            )
    finally:
        backend.close()


def median(values: Any) -> float:
    return float(statistics.median(values))


if __name__ == "__main__":
    main()
