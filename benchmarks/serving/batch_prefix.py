"""Does it pay to commit what the items of a batch share before they run? The same batch with and without.

    python -m benchmarks.serving.batch_prefix [--items 64 8 2] [--rounds 7]

Each round empties the prefix cache, runs the batch as it is, empties it again, commits the begin that all
prompts share (about 1,600 tokens of pocket), and runs the batch. Prints medians of wall and CPU seconds (of
all processes) of the whole, the commit included, their ratio, and how many prompt tokens were found in the
cache.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import sglang_dsl as sgl
from benchmarks.measuring import conditions, in_turn, keep, median, ratio
from sglang_dsl.backends.engine import EngineBackend

SHARED = " ".join(
    f"The capital of Ostrel is Belmar, its river is Sarn, and {n} is a number." for n in range(60)
)


@sgl.function(temperature=0, max_tokens=8)
def program(s: Any, number: int) -> None:
    s += sgl.user(SHARED + f" Question {number}: who are you?")
    s += sgl.assistant(sgl.gen("answer"))


def once(backend: EngineBackend, items: int, hoisted: bool) -> int:
    """One batch; how many prompt tokens were cached."""
    backend.flush_cache()
    if hoisted:
        program.cache(backend)
    states = program.run_batch([(number,) for number in range(items)], backend=backend)
    return sum(state.usage()["cached_tokens"] for state in states)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--items", type=int, nargs="+", default=[64, 8, 2])
    asked.add_argument("--rounds", type=int, default=7)
    asked.add_argument("--threads", type=int, default=1)
    asked.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-batch-prefix.md")
    words = asked.parse_args()
    lines = [
        "| items | as it is, wall s | CPU s | cached | committed first, wall s | CPU s | cached "
        "| wall ratio | CPU ratio |",
        "|---" * 9 + "|",
    ]
    print("\n".join(lines))
    backend = EngineBackend("pocket", threads=words.threads)
    try:
        for items in words.items:
            ways = {hoisted: partial(once, backend, items, hoisted) for hoisted in ("", "committed")}
            once(backend, items, False)
            took, gave = in_turn(ways, words.rounds)
            cells = [str(items)]
            for way in ways:
                spent = median(took[way])
                cells += [f"{spent.wall:.3f}", f"{spent.cpu:.3f}", f"{statistics.median(gave[way]):.0f}"]
            gain = ratio(took["committed"], took[""])
            lines.append("| " + " | ".join([*cells, f"{gain.wall:.2f}", f"{gain.cpu:.2f}"]) + " |")
            print(lines[-1], flush=True)
    finally:
        backend.close()
    where = conditions(f"{words.threads} thread(s), medians of {words.rounds} rounds, the ways in turn")
    print(where)
    if words.write:
        keep("batch-prefix", "\n".join([f"# Committing a batch's common begin first\n\n{where}.\n", *lines]))


if __name__ == "__main__":
    main()
