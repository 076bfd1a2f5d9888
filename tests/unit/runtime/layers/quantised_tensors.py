"""Matrices as quantisers write them, and the numbers they stand for, each by its format's own formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

F8 = torch.float8_e4m3fn
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # neighbour n stands at place AWQ_PLACES[n] of its word


class Made(NamedTuple):
    """Tensors by what stands behind the matrix' name, and the numbers [outputs, inputs]."""

    tensors: dict[str, Tensor]
    numbers: Tensor


def words(codes: Tensor, bits: int, places: Sequence[int] | None = None) -> Tensor:
    """Along the last dimension, which is filled up with zeros: 32 / bits codes to an int32, one by one."""
    each = 32 // bits
    places = places or range(each)
    rows, size = codes.shape
    made = torch.zeros(rows, -(-size // each), dtype=torch.int64)
    for place in range(size):
        made[:, place // each] |= codes[:, place].long() << (bits * places[place % each])
    return torch.where(made >= 1 << 31, made - (1 << 32), made).to(torch.int32)


def grouped(weight: Tensor, group: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Codes 0 to 2^bits - 1 [outputs, inputs], scales and zero points [outputs, groups]."""
    outputs, inputs = weight.shape
    parts = weight.unflatten(1, (-1, group))
    most = (1 << bits) - 1
    if symmetric:
        scale = (parts.abs().amax(-1) / (most // 2)).half()
        zero = torch.full_like(scale, 1 << (bits - 1))
    else:
        low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
        scale = ((high - low) / most).half()
        zero = (-low / scale).round().clamp(0, most)
    codes = ((parts / scale.float()[..., None]).round() + zero[..., None]).clamp(0, most)
    return codes.reshape(outputs, inputs).to(torch.uint8), scale, zero.to(torch.uint8)


def numbers(codes: Tensor, scale: Tensor, zero: Tensor, group: int) -> Tensor:
    parts = codes.float().unflatten(1, (-1, group)) - zero.float()[..., None]
    return (parts * scale.float()[..., None]).flatten(1)


# -- the formats ---------------------------------------------------------------------------------------------


def int8(weight: Tensor, *, tensor: bool = False, symmetric: bool = True) -> Made:
    """compressed-tensors, int-quantized."""
    codes, scale, zero = grouped(
        weight.reshape(1, -1) if tensor else weight,
        weight.numel() if tensor else weight.shape[1],
        8,
        symmetric,
    )
    made = numbers(codes, scale, zero, codes.shape[1]).reshape(weight.shape)
    tensors = {"weight": (codes.int() - 128).to(torch.int8).reshape(weight.shape), "weight_scale": scale}
    if tensor:
        tensors["weight_scale"] = scale.reshape(1)
    if not symmetric:
        tensors["weight_zero_point"] = (
            (zero.int() - 128).to(torch.int8).reshape(tensors["weight_scale"].shape)
        )
    return Made(tensors, made)


def fp8(weight: Tensor, *, block: tuple[int, int] | None = None, tensor: bool = False, **named: str) -> Made:
    """compressed-tensors' float-quantized, and fp8."""
    outputs, inputs = weight.shape
    tall, wide = block or ((outputs, inputs) if tensor else (1, inputs))
    rows, columns = -(-outputs // tall), -(-inputs // wide)
    scale, made = torch.empty(rows, columns), torch.empty_like(weight)
    codes = torch.empty(outputs, inputs, dtype=F8)
    for row in range(rows):
        for column in range(columns):
            place = (slice(row * tall, (row + 1) * tall), slice(column * wide, (column + 1) * wide))
            scale[row, column] = weight[place].abs().max() / 448
            codes[place] = (weight[place] / scale[row, column]).to(F8)
            made[place] = codes[place].float() * scale[row, column]
    name = named.get("scale", "weight_scale")
    tensors = {"weight": codes, name: scale.reshape(()) if tensor else scale, "input_scale": torch.ones(1)}
    return Made(tensors, made)


def packed(
    weight: Tensor, *, group: int, bits: int = 4, symmetric: bool = True, ordered: bool = False
) -> Made:
    """compressed-tensors, pack-quantized."""
    outputs, inputs = weight.shape
    index = torch.arange(inputs) // group
    if ordered:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(5))]
    order = index.argsort(stable=True)
    codes, scale, zero = grouped(weight[:, order], group, bits, symmetric)
    made = numbers(codes, scale, zero, group)
    back = order.argsort()
    tensors = {
        "weight_packed": words(codes[:, back], bits),
        "weight_scale": scale,
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words(zero.t(), bits).t().contiguous()
    if ordered:
        tensors["weight_g_idx"] = index.int()
    return Made(tensors, made[:, back])


def awq(weight: Tensor, *, group: int) -> Made:
    codes, scale, zero = grouped(weight, group, 4, False)
    tensors = {
        "qweight": words(codes.t(), 4, AWQ_PLACES),
        "qzeros": words(zero.t(), 4, AWQ_PLACES),
        "scales": scale.t().contiguous(),
    }
    return Made(tensors, numbers(codes, scale, zero, group))


def gptq(weight: Tensor, *, group: int, bits: int = 4, ordered: bool = False, less_one: bool = True) -> Made:
    outputs, inputs = weight.shape
    index = torch.arange(inputs) // group
    if ordered:
        index = index[torch.randperm(inputs, generator=torch.Generator().manual_seed(6))]
    order = index.argsort(stable=True)
    back = order.argsort()
    codes, scale, zero = grouped(weight[:, order], group, bits, False)
    zero = zero.clamp(min=1)  # zero less one has no code
    made = numbers(codes, scale, zero, group)
    tensors = {
        "qweight": words(codes[:, back], bits).t().contiguous(),
        "qzeros": words((zero - int(less_one)).t(), bits),
        "scales": scale.t().contiguous(),
        "g_idx": index.int(),
        "bias": torch.zeros(outputs),  # as some quantisers write it
    }
    return Made(tensors, made[:, back])


def _compressed(form: str, **scheme: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", **scheme}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"],
    }  # fmt: skip


def _gptq(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, **changes}


FP8: dict[str, Any] = {"num_bits": 8, "type": "float"}
GROUPS: dict[str, Any] = {"num_bits": 4, "strategy": "group", "group_size": 16}
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[Tensor], Made]]] = {
    "int8": (_compressed("int-quantized"), int8),
    "int8, one scale, zero point": (
        _compressed("int-quantized", strategy="tensor", symmetric=False),
        lambda weight: int8(weight, tensor=True, symmetric=False),
    ),
    "int8, zero points": (
        _compressed("int-quantized", symmetric=False), lambda weight: int8(weight, symmetric=False),
    ),
    "fp8, one scale": (
        _compressed("float-quantized", strategy="tensor", **FP8), lambda weight: fp8(weight, tensor=True),
    ),
    "fp8, channels": (_compressed("float-quantized", **FP8), fp8),
    "fp8, blocks": (
        _compressed("float-quantized", strategy="block", block_structure=[32, 24], **FP8),
        lambda weight: fp8(weight, block=(32, 24)),
    ),
    "int4": (_compressed("pack-quantized", **GROUPS), lambda weight: packed(weight, group=16)),
    "int4, zero points": (
        _compressed("pack-quantized", **GROUPS, symmetric=False),
        lambda weight: packed(weight, group=16, symmetric=False),
    ),
    "int4, channels": (
        _compressed("pack-quantized", num_bits=4), lambda weight: packed(weight, group=weight.shape[1]),
    ),
    "int4, ordered": (
        _compressed("pack-quantized", **GROUPS, actorder="group"),
        lambda weight: packed(weight, group=16, ordered=True),
    ),
    "int8, packed": (
        _compressed("pack-quantized", **{**GROUPS, "num_bits": 8}),
        lambda weight: packed(weight, group=16, bits=8),
    ),
    "fp8 of transformers": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
        lambda weight: fp8(weight, block=(32, 32), scale="weight_scale_inv"),
    ),
    "fp8, activations with a scale": (
        {"quant_method": "fp8", "activation_scheme": "static"}, lambda weight: fp8(weight, tensor=True),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
        lambda weight: awq(weight, group=16),
    ),
    "gptq": (_gptq(), lambda weight: gptq(weight, group=16)),
    "gptq, second version": (
        _gptq(checkpoint_format="gptq_v2"), lambda weight: gptq(weight, group=16, less_one=False),
    ),
    "gptq, ordered": (_gptq(desc_act=True), lambda weight: gptq(weight, group=16, ordered=True)),
    "gptq, 8 bits": (_gptq(bits=8), lambda weight: gptq(weight, group=16, bits=8)),
    "gptq, one group": (_gptq(group_size=-1), lambda weight: gptq(weight, group=weight.shape[1])),
}  # fmt: skip
"""Name -> quantization_config, and what writes a matrix so."""
