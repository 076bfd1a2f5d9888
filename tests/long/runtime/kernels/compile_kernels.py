"""Compile what the calls of the kernels in `calls()` would launch, for a GPU that need not be there: the
interpreter takes more than the compiler does. Run without TRITON_INTERPRET; prints a line per kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from runtime.kernels import device
from runtime.kernels.codes_matmul import codes_matmul
from runtime.kernels.elementwise import rms_norm, rotate, silu_mul
from runtime.kernels.gemv import gemv
from runtime.kernels.kv_store import move_kv, store_kv
from runtime.kernels.logprobs import gather_logprobs
from runtime.kernels.merge_states import merge_states
from runtime.kernels.moe import Blocks, fused_experts, grouped_matmul
from runtime.kernels.paged_attention import FIELDS, Form, Shape, States, Tiles, attend_tiles
from runtime.kernels.sampling import Changes, Draws, change, sample

TARGET = GPUTarget("cuda", 90, 32)
SHARED = 227 << 10  # bytes of a block there


def calls(dtype: torch.dtype, dim: int, group: int) -> None:
    hidden = torch.zeros(2, 4096, dtype=dtype)
    weight, residual = torch.ones(4096, dtype=dtype), torch.zeros(2, 4096, dtype=dtype)
    rms_norm(hidden, weight, 1e-5)
    rms_norm(hidden, weight, 1e-5, residual, wide=True)
    silu_mul(hidden)
    kv_heads = 2
    heads = group * kv_heads
    qkv = torch.zeros(2, heads + 2 * kv_heads, dim, dtype=dtype)
    rotate(qkv[:, : heads + kv_heads], *(torch.zeros(2, 1, dim, dtype=dtype) for _ in "cs"))
    ints = torch.zeros(16, dtype=torch.int32)
    pool = torch.zeros(16, 2 * kv_heads, dim, dtype=dtype)
    store_kv(qkv[:, heads:], pool, ints, ints)
    out, states = torch.zeros(2, heads, dim, dtype=dtype), States.empty(4, heads, dim, torch.device("cpu"))
    tiles = Tiles(torch.zeros(3, FIELDS, dtype=torch.int32), ints, ints, ints)
    sinks = torch.zeros(heads)
    for form in (Form(0.1), Form(0.1, 30.0, 128, sinks)):
        for rows in (16, 64):
            attend_tiles(qkv, pool, tiles, form, out, states, rows)
        merge_states(states, ints, ints, out, form.sinks)
    eight = torch.zeros(pool.shape, dtype=torch.float8_e4m3fn)  # a pool of fewer bits
    attend_tiles(qkv, eight, tiles, Form(0.1), out, states, 16)
    move_kv(pool[None], ints, ints)
    gemv(hidden[:1], torch.zeros(256, 4096, dtype=dtype))
    experts = torch.zeros(2, 2, dtype=torch.int64)
    fused_experts(
        hidden, torch.zeros(4, 256, 4096, dtype=dtype), torch.zeros(4, 4096, 128, dtype=dtype), experts,
        torch.ones(2, 2),
    )  # fmt: skip
    for codes, group in (
        (torch.zeros(256, 2048, dtype=torch.uint8), 128),
        (torch.zeros(256, 4096, dtype=torch.int8), 4096),
        (torch.zeros(256, 4096, dtype=torch.float8_e4m3fn), 128),
    ):
        scale = torch.zeros(256, 4096 // group)
        for some in (hidden, hidden.repeat(20, 1)):
            codes_matmul(some, codes, scale, scale if codes.dtype == torch.uint8 else None, group)
    for rows in (16, 64, 128):
        blocks = Blocks(torch.zeros(rows, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
        grouped_matmul(hidden, torch.zeros(4, 512, 4096, dtype=dtype), blocks, 1)
    logits, floats = torch.zeros(2, 128_256), torch.zeros(2)
    words = torch.zeros(1, 4008, dtype=torch.int32)
    sample(logits, Draws(floats, ints, floats, floats, ints.view(8, 2), ints, words), check=True)
    change(logits, Changes(ints[:2], ints[:2], floats, floats))
    gather_logprobs(logits, torch.zeros(2, 3, dtype=torch.int64))


def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In the place of a launch."""
    given = dict(zip(self.arg_names, args)) | {key: kwargs[key] for key in kwargs if key in self.arg_names}
    constants = {p.name for p in self.params if p.is_constexpr} | {
        name for name, value in given.items() if value is None
    }
    signature = {
        name: "constexpr" if name in constants else mangle_type(given[name]) for name in self.arg_names
    }
    attributes = {  # as a launch finds them in aligned pointers
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(self.arg_names)
        if isinstance(given[name], torch.Tensor)
    }
    options = {key: value for key, value in kwargs.items() if key not in self.arg_names}
    source = ASTSource(self, signature, {name: given[name] for name in constants}, attributes)
    made = triton.compile(source, target=TARGET, options=options)
    print(self.__name__, made.metadata.shared, "cubin" in made.asm)


if __name__ == "__main__":
    JITFunction.run = compile_only
    device.shared_memory = lambda _: SHARED
    calls(torch.bfloat16, 128, 4)
    calls(torch.float32, 96, 3)
    latent = torch.zeros(2, 130, 576, dtype=torch.bfloat16)  # of DeepSeek: 128 query heads for one key head
    ints, states = torch.zeros(16, dtype=torch.int32), States.empty(4, 128, 576, torch.device("cpu"))
    tiles = Tiles(torch.zeros(3, FIELDS, dtype=torch.int32), ints, ints, ints)
    out = torch.zeros(2, 128, 576, dtype=torch.bfloat16)
    attend_tiles(latent, latent[:, -2:], tiles, Form(0.1), out, states, Shape.of(128, 576).narrow)
    merge_states(states, ints, ints, out)
