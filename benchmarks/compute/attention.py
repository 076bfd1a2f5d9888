"""Attention implementations in the engine, in turn in one run:
`python -m benchmarks.compute.attention [--write]`.

CPU seconds of all processes for whole workloads on the random Llama of 40 M parameters, one thread, greedy;
ratios above 1: the last one named is faster. `same`: requests whose tokens are the first one's.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from benchmarks.measuring import HERE, conditions, in_turn, keep, median, ratio
from benchmarks.workloads import VOCAB, make_model
from runtime.api import Engine
from runtime.protocol.sampling import SamplingParams

Prompts = list[list[int]]
SLOTS = 24_000


def generate(engine: Engine, prompts: Prompts, new: int) -> Prompts:
    sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    return [list(out.output_ids) for out in engine.generate(prompts, sampling)]


def tree(engine: Engine, roots: Prompts, branches: list[list[int]], depth: int, new: int) -> Prompts:
    """As programs of tree of thought ask: from every root all branches, then one more thought on each."""
    texts = [root + branch for root in roots for branch in branches]
    for _ in range(depth):
        texts = [text + made + branches[0] for text, made in zip(texts, generate(engine, texts, new))]
    return texts


def workloads(seed: int = 0) -> dict[str, Callable[[Engine], Prompts]]:
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(256, VOCAB) for _ in range(count)]

    def batch(rows: int, length: int, new: int) -> Callable[[Engine], Prompts]:
        return partial(generate, prompts=[ids(length) for _ in range(rows)], new=new)

    def programs(system: int) -> Callable[[Engine], Prompts]:
        start = ids(system)
        return partial(
            tree,
            roots=[start + ids(40) for _ in range(32)],
            branches=[ids(8) for _ in range(3)],
            depth=2,
            new=16,
        )

    prefix = ids(1000)
    return {
        "single: 32 + 64": batch(1, 32, 64),
        "batch 8: 8 x (32 + 64)": batch(8, 32, 64),
        "batch 32: 32 x (32 + 64)": batch(32, 32, 64),
        "batch 64: 64 x (32 + 64)": batch(64, 32, 64),
        "long contexts: 32 x (300 + 32)": batch(32, 300, 32),
        "prefill: 1,024 + 1": batch(1, 1024, 1),
        "prefill: 3,000 + 1": batch(1, 3000, 1),
        "shared: 64 x (1,000 shared + 8 own + 16)": partial(
            generate, prompts=[prefix + ids(8) for _ in range(64)], new=16
        ),
        "tree of thought, 32 at once, prompt of 40": programs(40),
        "tree of thought, 32 at once, prompt of 500": programs(500),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", nargs="+", default=["torch_views", "native"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="run only workloads whose name contains this")
    parser.add_argument("--append", action="store_true", help="write behind what the day's file has")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-attention.md")
    options = parser.parse_args()
    folder = make_model(HERE / ".cache" / "llama-40m")
    names = options.names
    made = {"dtype": options.dtype, "max_total_tokens": SLOTS, "threads": options.threads}
    engines = {name: Engine(str(folder), attention=name, **made) for name in names}
    head = [
        "workload",
        *(f"{name}, CPU-s" for name in names),
        *(f"{name} / {names[-1]}" for name in names[:-1]),
    ]
    rows = []

    def cold(engine: Engine, work: Callable[[Engine], Prompts]) -> Prompts:
        engine.flush_cache()
        return work(engine)

    try:
        for name, work in tqdm(workloads().items()):
            if options.only not in name:
                continue
            ways = {one: partial(cold, engine, work) for one, engine in engines.items()}
            for engine in engines.values():
                generate(engine, [[300] * 8], 2)
            took, gave = in_turn(ways, options.rounds)
            first = gave[names[0]][0]
            same = sum(a == b for a, b in zip(first, gave[names[-1]][0], strict=True))
            cells = [name, *(f"{median(took[one]).cpu:.2f}" for one in names)]
            cells += [f"{ratio(took[one], took[names[-1]]).cpu:.2f}" for one in names[:-1]]
            rows.append([*cells, f"{same}/{len(first)}"])
            print(*rows[-1], sep=" | ", flush=True)
    finally:
        for engine in engines.values():
            engine.close()
    head.append("same")
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    Console(width=160).print(table)
    if options.write:
        lines = ["| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows)]
        where = conditions(
            f"torch {torch.__version__}, {options.threads} thread(s), {options.dtype}, median of "
            f"{options.rounds} rounds, in turn"
        )
        text = f"{where}.\n\n" + "\n".join(lines)
        text = text if options.append else f"# Attention on the CPU\n\n{text}"
        print(f"written to {keep('attention', text, append=options.append).relative_to(HERE.parent)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
