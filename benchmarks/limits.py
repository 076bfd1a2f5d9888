"""What the machine could do at best, measured: the rate at which memory is read, the rate of matrix products
in each precision, and what a workload would take if nothing but these counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.measuring import timed
from benchmarks.workloads import VOCAB, Workload
from runtime.kernels.native.products import product_of

SIZES = {"float32": 4, "bfloat16": 2, "int8": 1}
SIDE, ROWS = 2048, 512
WORDS = 64 << 20
REPEATS = 5


@dataclass(frozen=True)
class Limits:
    """Per CPU second: bytes read from memory, and floating point (or integer) operations by precision."""

    bandwidth: float
    products: dict[str, float]

    def seconds(self, work: Workload, precision: str, shape: dict[str, int]) -> float:
        """CPU seconds that a step's reads and products take at least, summed: each step costs the greater of
        reading the weights and the KV once and of its products. What prompts share counts once."""
        weights, head, kv = costs(shape)
        size, count, length = SIZES[precision], len(work.prompts), len(work.prompts[0])
        small = 2 if precision == "bfloat16" else 4
        rate, total = self.products[precision], 0.0
        own = length - work.shared
        for step in range(work.new_tokens):
            fresh = (count * own + work.shared) if step == 0 else count
            cached = 0 if step == 0 else count * (own + step) + work.shared
            read = (weights + head) * size + cached * kv * small
            total += max(read / self.bandwidth, 2 * (fresh * weights + count * head) / rate)
        return total


def costs(shape: dict[str, int]) -> tuple[int, int, int]:
    """Weights of the layers and of the output matrix, and numbers of KV per token, of a Llama with 4 KV
    heads of 64 dimensions."""
    wide, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    kv = 2 * 4 * 64
    layer = 2 * wide * wide + wide * kv + 3 * wide * inner
    return layers * layer, VOCAB * wide, layers * kv


def measure(threads: int) -> Limits:
    """Takes a few seconds, on `threads` threads."""
    torch.set_num_threads(threads)
    ones = torch.ones(WORDS)
    reads = [_least(lambda: torch.mv(ones.view(-1, 4096), ones[:4096]))]
    if (product := product_of(ones.view(-1, 4096))) is not None:  # reads in several places at once
        reads.append(_least(lambda: product(ones[:4096].view(1, -1), None)))
    bandwidth = ones.nbytes / min(reads)
    left, right = torch.randn(ROWS, SIDE), torch.randn(SIDE, SIDE)
    made = torch.ao.nn.quantized.dynamic.Linear(SIDE, SIDE)
    short, weight = left.bfloat16(), right.bfloat16()
    ways = {"float32": lambda: left @ right, "bfloat16": lambda: short @ weight, "int8": lambda: made(left)}
    rates = {name: 2 * ROWS * SIDE * SIDE / _least(way) for name, way in ways.items()}
    for name in ("bfloat16", "int8"):  # whatever has no instructions of its own can be made wide first
        rates[name] = max(rates[name], rates["float32"])
    return Limits(bandwidth, rates)


def _least(way: Any) -> float:
    way()
    return min(timed(way)[0].cpu for _ in range(REPEATS))
