"""Overlapped against plain scheduling, the same requests in turn: `python benchmarks/overlap.py`.

Prints wall and CPU seconds (of all processes) of each and their ratio (plain / overlapped; above 1:
overlapping gains). On a GPU the model computes elsewhere; on a CPU it shares the cores with the scheduler,
and with `--one-process` the interpreter, too.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402

from benchmarks.measuring import conditions, in_turn, keep, median, ratio  # noqa: E402
from benchmarks.workloads import make_model  # noqa: E402
from runtime.api import Engine  # noqa: E402

LOADS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "decode 8": (8, 96, {}),
    "decode 32": (32, 96, {}),
    "sampled 32": (32, 64, {"temperature": 1.0, "top_p": 0.9, "seed": 1}),
    "regex 32": (32, 64, {"regex": "([a-z]{2,9} ){60,90}"}),
    "turnover 32 of 96": (96, 0, {}),
}
"""name -> requests, new tokens (0: 16 to 64, so that they come and go), more parameters."""


def ask(engine: Engine, load: str, wide: bool) -> list[list[int]]:
    """Output ids of one cold run."""
    count, new, more = LOADS[load]
    engine.flush_cache()
    prompts = [[5 + (17 * n + 3 * i) % (20_000 if wide else 1_200) for i in range(32)] for n in range(count)]
    params = [
        {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": new or 16 + 7 * n % 49, **more}
        for n in range(count)
    ]
    return [list(output.output_ids) for output in engine.generate(prompts, params)]


def compare(engines: dict[str, Engine], load: str, rounds: int, wide: bool) -> list[str]:
    """Medians, and the median of the ratios of runs next to each other."""
    ways = {name: partial(ask, engine, load, wide) for name, engine in engines.items()}
    in_turn(ways, 1)
    took, gave = in_turn(ways, rounds)
    plain, over, gain = median(took["plain"]), median(took["overlapped"]), ratio(*took.values())
    cells = [load]
    for which in (0, 1):
        cells += [f"{plain[which]:.3f}", f"{over[which]:.3f}", f"{gain[which]:.2f}x"]
    return [*cells, "same" if gave["plain"] == gave["overlapped"] else "DIFFERENT"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--only", default="", help="run only loads whose name contains this")
    parser.add_argument(
        "--models", nargs="*", default=["pocket", "llama-40m"], help="pocket, llama-40m, or both"
    )
    parser.add_argument("--one-process", action="store_true", help="the model in the scheduler's process")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-overlap.md")
    options = parser.parse_args()
    head = [
        "model",
        "load",
        "plain wall s",
        "overlapped",
        "ratio",
        "plain CPU s",
        "overlapped",
        "ratio",
        "outputs",
    ]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    print("\n".join(lines))
    for name in options.models:
        model = name if name == "pocket" else str(make_model(HERE / ".cache" / name))
        engines = {
            way: Engine(
                model, device=options.device, threads=options.threads, max_total_tokens=16_384,
                max_running_requests=32, overlap=way == "overlapped",
                runner_process=False if options.one_process else None,
            )
            for way in ("plain", "overlapped")
        }  # fmt: skip
        try:
            for load in LOADS:
                if options.only in load:
                    cells = compare(engines, load, options.rounds, name != "pocket")
                    lines.append(f"| {name} | " + " | ".join(cells) + " |")
                    print(lines[-1], flush=True)
        finally:
            for engine in engines.values():
                engine.close()
    where = conditions(
        f"torch {torch.__version__}, {options.threads} thread(s)",
        "one process" if options.one_process else "the model in a process of its own",
        f"medians of {options.rounds} rounds, the ways in turn",
    )
    print(where)
    if options.write:
        keep("overlap", "\n".join(["# Overlapped against plain scheduling", "", f"{where}.", "", *lines]))


if __name__ == "__main__":
    main()
