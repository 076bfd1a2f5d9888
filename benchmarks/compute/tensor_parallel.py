"""One process against several that share the model: `python -m benchmarks.compute.tensor_parallel`.

The same requests in turn. Prints wall and CPU seconds (of all processes) of each number of ranks, the ratio
of one process to it (above 1: sharing gains), and what memory of its own a rank takes for the weights. Ranks
on one machine share its cores and its memory bandwidth: what sharing gains is what one process leaves unused.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import psutil
import torch

from benchmarks.measuring import HERE, conditions, in_turn, keep, median, ratio
from benchmarks.workloads import make_model
from runtime.api import Engine

LOADS = {"prefill 1 x 1024": (1, 1024, 1), "decode 1": (1, 32, 48), "decode 16": (16, 32, 48)}
"""name -> requests, prompt tokens, new tokens."""


def ask(engine: Engine, load: str, widest: int) -> list[list[int]]:
    """Output ids of one cold run."""
    count, length, new = LOADS[load]
    engine.flush_cache()
    prompts = [[5 + (17 * n + 3 * i) % widest for i in range(length)] for n in range(count)]
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": new}
    return [list(output.output_ids) for output in engine.generate(prompts, params)]


def own_memory() -> list[int]:
    """Of each process of a model that runs now, in MiB."""
    lines = {one: " ".join(one.cmdline()) for one in psutil.Process().children()}
    ranks = [
        one
        for one, line in lines.items()
        if "runtime.engine.follower" in line or line.startswith("sglang-dsl runner")
    ]
    texts = [Path(f"/proc/{one.pid}/status").read_text(encoding="ascii") for one in ranks]
    return [int(text.split("RssAnon:")[1].split()[0]) >> 10 for text in texts]


def memory_of(model: str, ranks: int, small: list[int] | None = None) -> list[int]:
    """MiB of each rank after loading, less what it takes with a small model."""
    with Engine(
        model,
        tp_size=ranks,
        runner_process=True,
        max_total_tokens=64,
        context_length=64,
        pack_weights="never",
    ):
        found = sorted(own_memory())
    return found if small is None else [mine - base for mine, base in zip(found, small, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--model", default="llama-40m", help="pocket, llama-40m, or a checkpoint's folder")
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/<date>-tensor-parallel.md"
    )
    options = parser.parse_args()
    model = options.model
    if model == "llama-40m":
        model = str(make_model(HERE / ".cache" / model))
    head = ["load", "ranks", "wall s", "CPU s", "wall: 1 / ranks", "outputs"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    engines = {
        ranks: Engine(
            model, tp_size=ranks, threads=options.threads, runner_process=True, max_total_tokens=8192, seed=1
        )
        for ranks in options.ranks
    }
    try:
        for load in LOADS:
            ways = {str(n): partial(ask, engine, load, 1200) for n, engine in engines.items()}
            in_turn(ways, 1)
            took, gave = in_turn(ways, options.rounds)
            first = next(iter(took))
            for ranks, readings in took.items():
                mid = median(readings)
                gain = f"{ratio(took[first], readings).wall:.2f}x"
                same = "same" if gave[ranks] == gave[first] else "DIFFERENT"
                lines.append(f"| {load} | {ranks} | {mid.wall:.3f} | {mid.cpu:.3f} | {gain} | {same} |")
    finally:
        for engine in engines.values():
            engine.close()
    lines += ["", "| ranks | MiB of its own that each rank takes for the weights |", "|---|---|"]
    for ranks in options.ranks:
        small = memory_of("pocket", ranks)
        lines.append(f"| {ranks} | {', '.join(map(str, memory_of(model, ranks, small)))} |")
    where = conditions(
        f"torch {torch.__version__}, {options.threads} thread(s) of each rank",
        f"{Path(model).name}, float32, gloo over loopback",
        f"medians of {options.rounds} rounds, the ways in turn",
    )
    print("\n".join([*lines, where]))
    if options.write:
        keep(
            "tensor-parallel", "\n".join(["# One process against several ranks", "", f"{where}.", "", *lines])
        )


if __name__ == "__main__":
    main()
