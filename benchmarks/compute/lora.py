"""What adapters cost: `python -m benchmarks.compute.lora`.

The same requests in turn: without adapters, with one for all, with as many as there are, mixed in one batch;
and the same mixed requests adapter by adapter, as a server does that has merged one into its weights at a
time (merging itself not counted). Prints CPU seconds of all processes, and ratios to the requests without.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.measuring import HERE, conditions, in_turn, keep, median, ratio
from benchmarks.workloads import make_model
from runtime.api import Engine

LOADS = {"decode 8": (8, 32, 48), "decode 32": (32, 32, 24), "prefill 4 x 512": (4, 512, 1)}
"""name -> requests, prompt tokens, new tokens."""
Asked = Sequence[str | None]


def make_adapters(folder: Path, model: Path, count: int, rank: int) -> dict[str, Path]:
    """Random ones on every linear layer of a Llama, as peft writes them."""
    with safe_open(model / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if name.endswith("_proj.weight")]  # noqa: SIM118
        shapes = {name.removesuffix(".weight"): file.get_slice(name).get_shape() for name in names}
    made = {f"a{number}": folder / f"r{rank}-{number}" for number in range(count)}
    for number, path in enumerate(made.values()):
        path.mkdir(parents=True, exist_ok=True)
        random = torch.Generator().manual_seed(number)
        tensors = {}
        for name, (outputs, inputs) in shapes.items():
            for letter, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                tensor = torch.randn(shape, generator=random) * 0.02
                tensors[f"base_model.model.{name}.lora_{letter}.weight"] = tensor
        save_file(tensors, path / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def ask(engine: Engine, load: str, adapters: Asked, *, apart: bool = False) -> list[list[int]]:
    """Output ids of one cold run; request i has adapters[i % len]. `apart`: the requests of one adapter, then
    those of the next, all without one."""
    count, length, new = LOADS[load]
    engine.flush_cache()
    prompts = [[5 + (17 * n + 3 * i) % 1200 for i in range(length)] for n in range(count)]
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": new}
    chosen = [adapters[n % len(adapters)] for n in range(count)]
    if not apart:
        return [list(one.output_ids) for one in engine.generate(prompts, params, lora_path=chosen)]
    found: list[list[int]] = []
    for name in dict.fromkeys(chosen):
        some = [prompt for prompt, whose in zip(prompts, chosen, strict=True) if whose == name]
        found += [list(one.output_ids) for one in engine.generate(some, params)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-lora.md")
    options = parser.parse_args()
    folder = HERE / ".cache"
    model = make_model(folder / "llama-40m")
    adapters = make_adapters(folder / "adapters", model, options.adapters, options.rank)
    names = list(adapters)
    head = ["load", "requests", "CPU s", "to those without"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    shared = {"dtype": options.dtype, "threads": options.threads, "max_total_tokens": 8192, "seed": 1}
    paths = [f"{name}={path}" for name, path in adapters.items()]
    with (
        Engine(str(model), **shared) as plain,
        Engine(str(model), lora_paths=paths, max_loras_per_batch=len(names), **shared) as engine,
    ):
        for load in LOADS:
            ways = {
                "no adapters taken": partial(ask, plain, load, [None]),
                "none has an adapter": partial(ask, engine, load, [None]),
                "all have one adapter": partial(ask, engine, load, names[:1]),
                "half have one, half none": partial(ask, engine, load, [names[0], None]),
                f"{len(names)} adapters mixed": partial(ask, engine, load, names),
                f"{len(names)} merged models, one after the other": partial(
                    ask, plain, load, names, apart=True
                ),
            }
            in_turn(ways, 1)
            took, gave = in_turn(ways, options.rounds)
            assert gave["none has an adapter"] == gave["no adapters taken"]
            for name, readings in took.items():
                more = ratio(readings, took["no adapters taken"]).cpu
                lines.append(f"| {load} | {name} | {median(readings).cpu:.3f} | {more:.2f}x |")
    where = conditions(
        f"torch {torch.__version__}, {options.threads} thread(s), {options.dtype}, {model.name}",
        f"rank {options.rank}, on every linear layer",
        f"medians of {options.rounds} rounds, the ways in turn",
    )
    print("\n".join([*lines, where]))
    if options.write:
        keep("lora", "\n".join(["# What adapters cost", "", f"{where}.", "", *lines]))


if __name__ == "__main__":
    main()
