"""The kernels alone, with Llama-3-8B's shapes in bfloat16, as a share of what the GPU can do.

    python -m benchmarks.compute.kernels

Bytes count once what must be read and written; the limit is what a copy of 1 GiB reaches in the same run, for
products of matrices what one of 8192 rows reaches. Repetitions are recorded in a CUDA graph, so that what is
timed is the kernels and not their launches. Needs a CUDA device; `--tiny` runs small shapes wherever Triton
can, to see that it works.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch

from runtime.attention.pool import KVShape
from runtime.attention.triton_tiles import TritonTiles
from runtime.kernels.codes_matmul import codes_matmul
from runtime.kernels.elementwise import rms_norm, rotate, silu_mul
from runtime.kernels.kv_store import store_kv
from runtime.kernels.logprobs import gather_logprobs
from runtime.kernels.moe import fused_experts
from runtime.kernels.sampling import Draws, sample
from runtime.plan import Row, Run, Segment, StepPlan
from runtime.protocol.sampling import SamplingParams

HEADS, KV_HEADS, DIM, HIDDEN, FFN, VOCAB = 32, 8, 128, 4096, 14336, 128_256


AGAIN = 10  # times a graph repeats what is timed


def limits(device: torch.device, size: int = 30) -> tuple[float, float]:
    """Bytes read and written a second by a copy of 2^size bytes; operations a second of a large product."""
    source = torch.zeros(1 << size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    edge = 8192 if size == 30 else 64
    matrix = torch.randn(edge, edge, device=device).to(torch.bfloat16 if size == 30 else torch.float32)
    found = []
    for run in (lambda: target.copy_(source), lambda: matrix @ matrix):
        took = []
        for _ in range(12):
            begin = time.perf_counter()
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
            took.append(time.perf_counter() - begin)
        found.append(min(took))
    return 2 * source.nbytes / found[0], 2 * edge**3 / found[1]


def seconds(run: Callable[[], object], device: torch.device, rounds: int) -> float:
    """The median of some rounds, after those that do not count."""
    if device.type != "cuda":
        run()
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(AGAIN):
            run()
    graph.replay()
    took = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end) / 1e3 / AGAIN)
    return sorted(took)[len(took) // 2]


def decoding(rows: int, own: int, shared: int = 0, new: int = 1) -> tuple[StepPlan, int]:
    """A plan of rows with `own` keys each behind `shared` common ones; how many slots it takes."""
    segments, first = [], shared
    if shared:
        segments.append(Segment((Run(0, shared),), tuple(range(rows)), 0))
    made = []
    for number in range(rows):
        if own:
            segments.append(Segment((Run(first, own),), (number,), shared))
        made.append(
            Row(number, (1,) * new, shared + own, (Run(first + own, new),), SamplingParams(temperature=0.0))
        )
        first += own + new
    return StepPlan(tuple(made), tuple(segments)), first


def attention_cases(
    device: torch.device, dtype: torch.dtype, tiny: bool
) -> Iterator[tuple[str, Callable[[], object], float, float]]:
    """Name, call, bytes, floating-point operations."""
    cases = [(1, 1024, 0, 1), (32, 1024, 0, 1), (256, 1024, 0, 1), (32, 8192, 0, 1), (256, 24, 1000, 1),
             (1, 0, 0, 8192), (4, 4096, 0, 512)]  # fmt: skip
    if tiny:
        cases = [(2, 30, 0, 1), (2, 5, 20, 1), (1, 0, 0, 20)]
    for rows, own, shared, new in cases:
        plan, slots = decoding(rows, own, shared, new)
        attention = TritonTiles(KVShape(1, KV_HEADS, DIM, dtype, device), slots, HEADS, (None,))
        qkv = torch.randn(rows * new, HEADS + 2 * KV_HEADS, DIM, device=device).to(dtype)
        step = attention.begin(plan)
        keys = shared + rows * (own + new)
        seen = rows * new * (shared + own + (new + 1) / 2)
        moved = 2 * keys * KV_HEADS * DIM * dtype.itemsize + 2 * qkv.nbytes
        name = f"attention: {rows} x {new} new, {own} own, {shared} shared"
        yield name, lambda step=step, qkv=qkv: step(0, qkv), moved, 4 * seen * HEADS * DIM


def cases(
    device: torch.device, dtype: torch.dtype, tiny: bool
) -> Iterator[tuple[str, Callable[[], object], float, float]]:
    """The same for all kernels."""
    tokens, hidden, ffn, vocab = (2, 64, 128, 300) if tiny else (4096, HIDDEN, FFN, VOCAB)
    rows = 2 if tiny else 256

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    x, residual, weight = noise(tokens, hidden), noise(tokens, hidden), noise(hidden)
    yield "RMS norm with residual", lambda: rms_norm(x, weight, 1e-5, residual), 4 * x.nbytes, 0.0
    both = noise(tokens, 2 * ffn)
    yield "SiLU times up", lambda: silu_mul(both), 1.5 * both.nbytes, 0.0
    qkv, angles = noise(tokens, HEADS + 2 * KV_HEADS, DIM), noise(tokens, 1, DIM)
    turned = qkv[:, : HEADS + KV_HEADS]
    yield "rotary", lambda: rotate(turned, angles, angles), 2 * turned.numel() * dtype.itemsize, 0.0
    pool = noise(tokens, 2 * KV_HEADS, DIM)
    places = torch.arange(tokens, dtype=torch.int32, device=device)
    yield "KV store", lambda: store_kv(qkv[:, HEADS:], pool, places, places), 2 * pool.nbytes, 0.0
    logits = torch.randn(rows, vocab, device=device)
    whole = torch.zeros(rows, dtype=torch.int32, device=device)
    ones = torch.ones(rows, device=device)
    words, keys = (torch.zeros(size, dtype=torch.int32, device=device) for size in ((1, 1), (rows, 2)))
    for name, temperature, k, p in (
        ("best", 0.0, 0, 1.0),
        ("draw", 1.0, 0, 1.0),
        ("top-k and top-p", 1.0, 50, 0.9),
    ):
        draws = Draws(ones * temperature, whole + k, ones * p, ones * 0, keys, whole - 1, words)
        yield f"sampling: {name}, {rows} rows", lambda draws=draws: sample(logits, draws), logits.nbytes, 0.0
    ids = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    yield f"log-probabilities, {rows} rows", lambda: gather_logprobs(logits, ids), logits.nbytes, 0.0
    count, top_k, width = (4, 2, 32) if tiny else (128, 8, 768)  # Qwen3-30B-A3B's
    inner = 64 if tiny else 2048
    gate_up, down = noise(count, 2 * width, inner), noise(count, inner, width)
    for some in (2,) if tiny else (32, 4096):
        chosen = torch.rand(some, count, device=device).topk(top_k)
        given = noise(some, inner)
        used = (1 - (1 - top_k / count) ** some) * (gate_up.nbytes + down.nbytes)  # by some token
        operations = 6.0 * some * top_k * inner * width
        yield (
            f"{count} experts, {some} tokens",
            lambda given=given, chosen=chosen: fused_experts(
                given, gate_up, down, chosen.indices, chosen.values
            ),
            used + 2 * given.nbytes,
            operations,
        )
    for kind, columns in ((torch.uint8, ffn), (torch.int8, ffn), (torch.float8_e4m3fn, ffn)):
        width = hidden // 2 if kind == torch.uint8 else hidden
        codes = torch.randint(0, 100, (columns, width), device=device, dtype=torch.uint8).view(kind)
        scale = torch.rand(columns, max(1, hidden // 128), device=device)
        offset = scale if kind == torch.uint8 else None
        for some in (1, 2) if tiny else (1, 32):
            given = noise(some, hidden)
            yield (
                f"{str(kind).removeprefix('torch.')} codes, {some} rows",
                lambda given=given, codes=codes, scale=scale, offset=offset: codes_matmul(
                    given, codes, scale, offset, hidden // scale.shape[1]
                ),
                codes.nbytes + scale.nbytes * (1 if offset is None else 2) + 2 * columns * some,
                2.0 * some * hidden * columns,
            )
    yield from attention_cases(device, dtype, tiny)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    if not (given.tiny or torch.cuda.is_available()):
        parser.exit(1, "needs a CUDA device; --tiny runs small shapes without (TRITON_INTERPRET=1)\n")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rounds = 1 if given.tiny else 20
    with torch.inference_mode():
        bandwidth, rate = limits(device, 16 if given.tiny else 30)
        print(f"copy {bandwidth / 1e9:.0f} GB/s, product {rate / 1e12:.2f} TFLOP/s")
        for name, call, moved, operations in cases(device, dtype, given.tiny):
            took = seconds(call, device, rounds)
            line = f"  {name:48} {1e6 * took:10.1f} us  {moved / took / bandwidth:6.1%} of the copy"
            print(f"{line}, {operations / took / rate:6.1%} of the product" if operations else line)


if __name__ == "__main__":
    main()
