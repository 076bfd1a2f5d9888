"""Quantization: how the matrices of a checkpoint are stored, read from its config.json. Torch-free.

It knows the formats' fields; runtime/layers/quantised knows the tensors and how to dequantise them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from runtime.config.fields import Fields
from runtime.protocol.errors import BadRequest

ON_LOAD = ("fp8", "w8a8_int8")
"""Formats to which plain weights can be quantised while they are loaded."""
FROM_ANY = "w8a8_int8"
"""The format to which quantised checkpoints can be converted, too."""
KV_DTYPES = ("auto", "bfloat16", "fp8_e4m3", "fp8_e5m2")
"""Dtypes of the KV cache; auto: the one that the model is computed in."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """method        a format's name: compressed-tensors, fp8, awq, gptq or gguf
    bits          of one code
    group         inputs that share a scale; 0: all of an output
    block         (outputs, inputs) of a rectangle with one scale; None: no rectangles
    packed        several codes per int32
    symmetric     the code 0 stands for the number 0
    ordered       inputs were grouped by their weight ("act-order"), not by their position
    zeros_less_one   zero points are stored minus one, as AutoGPTQ did"""

    method: str
    bits: int
    group: int = 0
    block: tuple[int, int] | None = None
    packed: bool = False
    symmetric: bool = True
    ordered: bool = False
    zeros_less_one: bool = False


def check_requested(stored: Quantization | None, requested: str | None) -> None:
    """Raise BadRequest if the checkpoint's matrices cannot be loaded as `requested` (None: as they are)."""
    if requested is None or (stored is not None and requested in (stored.method, FROM_ANY)):
        return
    if stored is not None:
        raise BadRequest(
            f"is {requested!r}, but the checkpoint is quantised as {stored.method!r}",
            where="quantization",
            hint=f"leave it out; on the CPU, {FROM_ANY} computes its numbers in integers",
        )
    if requested not in ON_LOAD:
        raise BadRequest(
            f"is {requested!r}, but the checkpoint is not quantised; possible for it: {', '.join(ON_LOAD)}",
            where="quantization",
            hint="leave it out, or use a checkpoint quantised that way",
        )


def read_quantization(config: Fields) -> Quantization | None:
    """From a config.json; None if its weights are plain. Raises ModelLoadError for an unknown or unsupported
    format."""
    name = "quantization_config" if config.has("quantization_config") else "compression_config"
    if not config.has(name):
        return None
    fields = config.child(name)
    method = fields.text("quant_method", "")
    if method == "mxfp4":
        return None  # experts in one tensor, which are dequantised while they are read: layers/stacked.py
    if method not in _READERS:
        raise fields.fail(
            f"the quantisation {method!r} is not supported; known: {', '.join(_READERS)}",
            "use another quantisation of the model, or its plain weights",
        )
    return _READERS[method](fields)


def _compressed_tensors(fields: Fields) -> Quantization:
    if fields.child("sparsity_config").text("format", "dense") != "dense":
        raise fields.child("sparsity_config").fail("sparse weights are not supported")
    groups = fields.child("config_groups")
    if not groups.values:
        raise groups.fail("defines no scheme")
    schemes = [_scheme(groups.child(name).child("weights"), fields) for name in groups.values]
    if any(scheme != schemes[0] for scheme in schemes):
        raise groups.fail("several schemes for weights in one checkpoint are not supported")
    return schemes[0]


def _scheme(weights: Fields, fields: Fields) -> Quantization:
    bits, kind = weights.integer("num_bits"), weights.text("type", "int")
    strategy = weights.text("strategy", "tensor")
    form = weights.text("format", fields.text("format", "dense"))
    packed = form == "pack-quantized"
    known = {
        "pack-quantized": ((4, "int"), (8, "int")),
        "int-quantized": ((8, "int"),),
        "float-quantized": ((8, "float"),),
        "naive-quantized": ((8, "int"), (8, "float")),
    }
    if (bits, kind) not in known.get(form, ()):
        raise weights.fail(
            f"weights of {bits} bits of type {kind!r} in the format {form!r} are not supported",
            "known: pack-quantized (int4, int8), int-quantized (int8), float-quantized (fp8)",
        )
    symmetric = weights.flag("symmetric", True)
    order = weights.text("actorder", "") if not isinstance(weights.values.get("actorder"), bool) else ""
    ordered = order == "group" or weights.values.get("actorder") is True
    match strategy:
        case "tensor" | "channel":
            group, block = 0, None
        case "group":
            group, block = weights.integer("group_size"), None
        case "block":
            group, block = 0, _rectangle(weights, "block_structure")
        case _:
            raise weights.fail(f"the strategy {strategy!r} is not supported: tensor, channel, group or block")
    return Quantization(
        "compressed-tensors",
        bits,
        group=group,
        block=block,
        packed=packed,
        symmetric=symmetric,
        ordered=ordered,
    )


def _fp8(fields: Fields) -> Quantization:
    block = _rectangle(fields, "weight_block_size") if fields.has("weight_block_size") else None
    return Quantization("fp8", 8, block=block)


def _awq(fields: Fields) -> Quantization:
    if (version := fields.text("version", "gemm").lower()) != "gemm":
        raise fields.fail(f"'version' {version!r} is not supported; known: gemm")
    if (bits := fields.integer("bits", 4)) != 4:
        raise fields.fail(f"'bits' must be 4, got {bits}")
    if not fields.flag("zero_point", True):
        raise fields.fail("'zero_point' false is not supported")
    return Quantization("awq", bits, group=_group_size(fields), packed=True, symmetric=False)


def _gptq(fields: Fields) -> Quantization:
    if (bits := fields.integer("bits")) not in (4, 8):
        raise fields.fail(f"'bits' must be 4 or 8, got {bits}")
    form = fields.text("checkpoint_format", "gptq")
    if form not in ("gptq", "gptq_v2"):
        raise fields.fail(f"'checkpoint_format' {form!r} is not supported; known: gptq, gptq_v2")
    return Quantization(
        "gptq",
        bits,
        group=_group_size(fields),
        packed=True,
        symmetric=False,  # zero points are stored even if all are equal
        ordered=fields.flag("desc_act", False),
        zeros_less_one=form == "gptq",
    )


def _group_size(fields: Fields) -> int:
    """-1 means all inputs of an output."""
    if fields.values.get("group_size", 128) == -1:
        return 0
    return fields.integer("group_size", 128)


def _rectangle(fields: Fields, name: str) -> tuple[int, int]:
    value = fields.values.get(name)
    if isinstance(value, str):  # "128x128"
        value = [int(part) if part.isdigit() else 0 for part in value.split("x")]
    if not isinstance(value, list) or len(value) != 2 or any(type(n) is not int or n < 1 for n in value):
        raise fields.fail(f"{name!r} must be two sizes, got {fields.values.get(name)!r}")
    return value[0], value[1]


_READERS: dict[str, Callable[[Fields], Quantization]] = {
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "gguf": lambda fields: Quantization("gguf", 8),
}
