"""What matrices in codes take and save: `python -m benchmarks.compute.quantised [--rounds 5] [--write]`.

One random Llama (workloads.py; 24 M of its 40 M numbers in the layers' matrices) as a plain checkpoint and in
three kinds of codes: int8 with a scale for each output, fp8 with one for each 128 x 128 block, int4 with one
for each 128 inputs. Each is loaded in every way there is: as codes, as the numbers that they stand for, and
multiplied in integers (w8a8_int8); decoding of one and of eight sequences is timed in turn. Memory is that of
the process after loading, less that of one that has loaded nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.measuring import HERE, conditions, keep
from benchmarks.workloads import make_model

CACHE = HERE / ".cache"
STEPS = 24
BATCHES = (1, 8)
GROUP = 128


def int8(weight: Tensor) -> dict[str, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def fp8(weight: Tensor) -> dict[str, Tensor]:
    rows, columns = (-(-size // GROUP) for size in weight.shape)
    padded = weight.new_zeros(rows * GROUP, columns * GROUP)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(rows, GROUP, columns, GROUP)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).view_as(padded)[: weight.shape[0], : weight.shape[1]]
    return {"weight": codes.to(torch.float8_e4m3fn).contiguous(), "weight_scale_inv": scale}


def int4(weight: Tensor) -> dict[str, Tensor]:
    groups = weight.unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1) / 7
    codes = ((groups / scale[..., None]).round() + 8).flatten(1).to(torch.int32)
    words = (codes.unflatten(1, (-1, 8)) << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1)
    packed = torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
    return {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    scheme = {"weights": {"type": "int", "symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": scheme}}


KINDS: dict[str, tuple[dict[str, Any], Callable[[Tensor], dict[str, Tensor]]]] = {
    "int8": (_compressed("int-quantized", num_bits=8, strategy="channel"), int8),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, fp8),
    "int4": (_compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP), int4),
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("", {}),
    "float32, one copy": ("", {"pack_weights": "never"}),
    "float32, w8a8_int8": ("", {"quantization": "w8a8_int8"}),
    "float32, fp8 on load": ("", {"quantization": "fp8"}),
    **{
        f"{kind}, {name}": (kind, way)
        for kind in KINDS
        for name, way in {
            "codes": {"expand_weights": "never"},
            "numbers": {"expand_weights": "always"},
            "w8a8_int8": {"quantization": "w8a8_int8"},
        }.items()
    },
}
"""Name -> kind of checkpoint, options of the runner."""


def checkpoint(kind: str) -> Path:
    plain = make_model(CACHE / "llama-40m")
    if not kind:
        return plain
    config, write = KINDS[kind]
    folder = CACHE / f"llama-40m-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(plain, folder)
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.{part}": one for part, one in write(tensor.float()).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return folder


def serve(folder: str, way: dict[str, Any]) -> None:
    """In a process of its own: say what loading took, then the CPU seconds of each batch that is asked
    for."""
    import time

    from runtime.config.model import ModelSpec
    from runtime.config.runner import RunnerConfig
    from runtime.engine.runner import TorchRunner
    from runtime.plan import Row, Run, Segment, StepPlan
    from runtime.protocol.sampling import SamplingParams

    torch.set_num_threads(1)
    torch.ones(8, 8) @ torch.ones(8, 8)
    before = psutil.Process().memory_info().rss
    config = RunnerConfig(dtype="float32", device="cpu", threads=1, max_total_tokens=1024, **way)
    runner = TorchRunner.load(folder, ModelSpec.from_dir(folder), config, beside=False)
    print(json.dumps({"memory": psutil.Process().memory_info().rss - before}), flush=True)
    greedy = SamplingParams(temperature=0.0)
    for line in sys.stdin:
        rows, began = int(line), 0.0
        for step in range(STEPS + 1):
            if step == 1:  # the first is the prompt
                began = time.process_time()
            made = [
                Row(row + 1, (5,), step, (Run(row * 64 + step, 1),), greedy, step=step) for row in range(rows)
            ]
            seen = tuple(Segment((Run(row * 64, step),), (row,), 0) for row in range(rows)) if step else ()
            runner.launch(StepPlan(tuple(made), seen))
            runner.finish({})
        print(json.dumps({"cpu": time.process_time() - began}), flush=True)


def started(name: str) -> tuple[subprocess.Popen[str], float]:
    kind, way = WAYS[name]
    command = [
        sys.executable,
        "-m",
        "benchmarks.compute.quantised",
        "--serve",
        str(checkpoint(kind)),
        json.dumps(way),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["memory"]


def asked(process: subprocess.Popen[str], rows: int) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{rows}\n")
    process.stdin.flush()
    return float(json.loads(process.stdout.readline())["cpu"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=tuple(WAYS), default=tuple(WAYS))
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/<date>-quantised.md")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.serve:
        serve(words.serve[0], json.loads(words.serve[1]))
        return
    running = {name: started(name) for name in words.only}
    took: dict[tuple[str, int], list[float]] = {(name, rows): [] for name in running for rows in BATCHES}
    for number in range(words.rounds):
        for name in reversed(running) if number % 2 else running:
            for rows in BATCHES:
                took[name, rows].append(asked(running[name][0], rows))
    head = ["kept as", "memory, MiB", *(f"{rows} at once, tokens per CPU s" for rows in BATCHES)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for name, (process, memory) in running.items():
        rates = [f"{rows * STEPS / statistics.median(took[name, rows]):.0f}" for rows in BATCHES]
        lines.append("| " + " | ".join([name, f"{memory / 2**20:.0f}", *rates]) + " |")
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
    print("\n".join(lines))
    if words.write:
        where = conditions("random Llama of 40 M parameters, float32, one thread")
        text = f"# Matrices in codes\n\n{where}.\n\n"
        print("written to", keep("quantised", text + "\n".join(lines) + "\n"))


if __name__ == "__main__":
    main()
