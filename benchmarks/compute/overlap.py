"""Overlapped against plain scheduling, the same requests in turn: `python -m benchmarks.compute.overlap`.

Prints wall and CPU seconds (of all processes) of each and their ratio (plain / overlapped; above 1:
overlapping gains). On a GPU the model computes elsewhere; on a CPU it shares the cores with the scheduler,
and with `--one-process` the interpreter, too. `--places` compares these two places of the model instead, each
with its default loop.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import torch

from benchmarks.measuring import HERE, conditions, in_turn, keep, median, ratio
from benchmarks.workloads import make_model
from runtime.api import Engine

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "age": {"type": "integer"},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 4},
            "city": {"enum": ["Paris", "Rome", "Berlin"]},
        },
        "required": ["name", "age", "tags", "city"],
    }
)
LOADS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "decode 8": (8, 96, {}),
    "decode 32": (32, 96, {}),
    "sampled 32": (32, 64, {"temperature": 1.0, "top_p": 0.9, "seed": 1}),
    "regex 32": (32, 64, {"regex": "([a-z]{2,9} ){60,90}"}),
    "schema 32": (32, 64, {"json_schema": SCHEMA}),
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
    first, second = ways
    before, after, gain = median(took[first]), median(took[second]), ratio(*took.values())
    cells = [load]
    for which in (0, 1):
        cells += [f"{before[which]:.3f}", f"{after[which]:.3f}", f"{gain[which]:.2f}x"]
    return [*cells, "same" if gave[first] == gave[second] else "DIFFERENT"]


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
    parser.add_argument("--places", action="store_true", help="the model's own process, or the scheduler's")
    options = parser.parse_args()
    here = False if options.one_process else None
    ways: dict[str, dict[str, Any]] = {
        "plain": {"overlap": False, "runner_process": here},
        "overlapped": {"overlap": True, "runner_process": here},
    }
    if options.places:
        ways = {"own process": {"runner_process": True}, "one process": {"runner_process": False}}
    first, second = ways
    head = [
        "model",
        "load",
        f"{first}, wall s",
        second,
        "ratio",
        f"{first}, CPU s",
        second,
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
                max_running_requests=32, **more,
            )
            for way, more in ways.items()
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
        *(
            []
            if options.places
            else ["one process" if options.one_process else "the model in a process of its own"]
        ),
        f"medians of {options.rounds} rounds, the ways in turn",
    )
    print(where)
    if options.write:
        name = "places" if options.places else "overlap"
        title = "The model's process" if options.places else "Overlapped against plain scheduling"
        keep(name, "\n".join([f"# {title}", "", f"{where}.", "", *lines]))


if __name__ == "__main__":
    main()
