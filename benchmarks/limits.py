"""What the machine could do at best, measured: the rate at which memory is read, the rate of matrix products
in each precision, and what a workload would take if nothing but these counted."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import timed
from benchmarks.workloads import VOCAB, Workload
from runtime.kernels.native.panels import empty
from runtime.layers.dense import product_of

SIZES = {"float32": 4, "bfloat16": 2, "int8": 1}
SIDE, ROWS = 2048, 512
BYTES = 256 << 20
STREAMS = (1, 2, 4, 8)
PART = 512 * STREAMS[-1]  # bytes that the reading loop takes of all streams in turn, at most
LOOPS = 20_000_000  # rounds of a loop: some 50 to 200 ms
REPEATS, ENOUGH_S = 5, 2.0
FLAGS = ("-O3", "-march=native", "-fPIC", "-shared")
COMPILE_S = 120.0


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
    """Takes some ten seconds, on `threads` threads. The fastest of loops that do nothing else (peaks.c), of
    torch and of this project: no engine's product or read is much faster than what is called the limit."""
    torch.set_num_threads(threads)
    ones = empty((BYTES // 4,), torch.float32).fill_(1)
    left, right = torch.randn(ROWS, SIDE), torch.randn(SIDE, SIDE)
    short, codes = (left.bfloat16(), right.bfloat16()), right.mul(30).to(torch.int8)
    with warnings.catch_warnings():  # deprecated, and there is no other way to FBGEMM's products
        warnings.simplefilter("ignore", UserWarning)
        fbgemm = torch.ao.nn.quantized.dynamic.Linear(SIDE, SIDE)
    products: dict[str, list[Callable[[], Any]]] = {
        "float32": [lambda: left @ right, *_ours(left, right)],
        "bfloat16": [lambda: short[0] @ short[1], *_ours(*short)],
        "int8": [lambda: fbgemm(left), *_ours(left, codes, torch.ones(SIDE))],
    }
    operations = 2 * ROWS * SIDE * SIDE
    reads = [
        lambda: torch.mv(ones.view(-1, 4096), ones[:4096]),
        *_ours(ones[:4096].view(1, -1), ones.view(-1, 4096)),
    ]
    with ThreadPoolExecutor(threads) as pool:
        loops = _loops()
        if loops is not None:
            reads += [partial(_read, loops, ones, streams, threads, pool) for streams in STREAMS]
        rates = {
            name: max([operations / _least(way) for way in ways] + _alone(loops, name, threads, pool))
            for name, ways in products.items()
        }
        bandwidth = ones.nbytes / min(map(_least, reads))
    for name in ("bfloat16", "int8"):  # whatever has no instructions of its own can be made wide first
        rates[name] = max(rates[name], rates["float32"])
    return Limits(bandwidth, rates)


def _ours(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> list[Callable[[], Any]]:
    product = product_of(weight, scale)
    return [] if product is None else [lambda: product(x, None)]


def _loops() -> ctypes.CDLL | None:
    """peaks.c. None: it cannot be compiled, which is told."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "peaks.so"
        command = [
            os.environ.get("CC", "cc"),
            *FLAGS,
            str(Path(__file__).with_name("peaks.c")),
            "-o",
            str(made),
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=COMPILE_S)
        except (OSError, subprocess.SubprocessError) as error:
            print(
                f"limits are those of libraries alone: {getattr(error, 'stderr', None) or error}",
                file=sys.stderr,
            )
            return None
        loops = ctypes.CDLL(str(made))
    for name in SIZES:
        loop = getattr(loops, f"multiply_{name}")
        loop.restype, loop.argtypes = ctypes.c_int64, (ctypes.c_int64,)
    loops.read_memory.restype = None
    loops.read_memory.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
    return loops


def _alone(loops: ctypes.CDLL | None, name: str, threads: int, pool: ThreadPoolExecutor) -> list[float]:
    """The rate of multiplications in registers; nothing where it is not known."""
    if loops is None:
        return []
    loop, rounds = getattr(loops, f"multiply_{name}"), [LOOPS] * threads
    done = sum(map(loop, rounds))
    return [done / _least(lambda: list(pool.map(loop, rounds)))] if done else []


def _read(loops: ctypes.CDLL, ones: Tensor, streams: int, threads: int, pool: ThreadPoolExecutor) -> None:
    """A part by each thread."""
    part = ones.nbytes // threads // PART * PART
    starts = [ones.data_ptr() + number * part for number in range(threads)]
    list(pool.map(lambda start: loops.read_memory(start, part, streams), starts))


def _least(way: Callable[[], Any]) -> float:
    """CPU seconds: of REPEATS calls, or of fewer where they take ENOUGH_S."""
    took = [timed(way)[0].cpu]
    while len(took) <= REPEATS and sum(took) < ENOUGH_S:
        took.append(timed(way)[0].cpu)
    return min(took)
