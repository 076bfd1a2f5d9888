"""NativeLayers: a decoder without its head, in one call of the C library, for passes of up to 64 tokens.
The same kernels in the same order as layer by layer, without the cost of some ten calls and tensors per
layer. Only for the layers that most families have."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_void_p
from typing import NamedTuple

import torch
from torch import Tensor

from runtime.attention.native_views import NativeStep
from runtime.config.model import ModelSpec
from runtime.kernels.native import layers as kernels
from runtime.kernels.native.library import DIM_STEP, DecoderLayer, DecoderShape, Matrix
from runtime.layers.dense import DenseLinear
from runtime.layers.int8 import Int8Linear
from runtime.layers.mlp import GatedMLP
from runtime.layers.norm import Norm, RMSNorm
from runtime.layers.rope import Rotary
from runtime.models.layer import Layer

ANGLES = 512, 8192
"""How many positions' angles are kept, at first and at most. Angles of later positions are computed for each
pass."""


class NativeLayers:
    """For passes of up to `most` tokens."""

    def __init__(
        self,
        shape: DecoderShape,
        entries: ctypes.Array[DecoderLayer],
        rotaries: Sequence[Rotary],
        like: Tensor,
        most: int,
    ) -> None:
        """shape points to entries; the caller keeps alive what these point to. like: a tensor of the
        decoder's dtype."""
        self.most = most
        self._shape, self._entries, self._rotaries, self._like = shape, entries, rotaries, like
        self._work: Tensor | None = None
        self._angles = _Angles([], 0)
        self._first = torch.arange(most)

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        embedding: Tensor,
        layers: Sequence[Layer],
        final_norm: Norm,
        heads: tuple[int, int],
        rotaries: Sequence[Rotary],
        rotary_of: Sequence[int | None],
    ) -> NativeLayers | None:
        """embedding: the whole table. heads: the query heads and key heads on this rank. rotary_of: each
        layer's index into `rotaries`. None if such layers are not supported, or another product is faster."""
        if spec.embedding_scale != 1.0 or spec.learned_positions or not embedding.is_contiguous():
            return None
        if spec.parallel or spec.qkv_by_head or spec.query_growth or spec.residual_scale != 1.0:
            return None
        parts = [_Parts.of(layer) for layer in layers]
        supported = [one for one in parts if one is not None]
        if not supported or len(supported) < len(parts) or not isinstance(final_norm, RMSNorm):
            return None
        norms = [final_norm, *(norm for one in supported for norm in one.norms)]
        ffn = supported[0].linears[3].inputs
        by_head = [one.qk_norm for one in supported if one.qk_norm is not None]
        linears = [linear for one in supported for linear in one.linears]
        dtype = embedding.dtype
        most = min(linear.few_rows for linear in linears)
        if (
            most < 1
            or ffn % DIM_STEP
            or any(isinstance(one, DenseLinear) and one.dtype != dtype for one in linears)
            or any(norm.weight.dtype != final_norm.weight.dtype for norm in (*norms, *by_head))
            or not all(norm.uses_kernel((spec.hidden_size,), dtype) for norm in norms)
            or not all(norm.uses_kernel((sum(heads), spec.head_dim), dtype) for norm in by_head)
            or not all(rotary.turned for rotary in rotaries)
        ):
            return None
        entries = (DecoderLayer * len(supported))()
        for number, (one, index) in enumerate(zip(supported, rotary_of, strict=True)):
            turned = 0 if index is None else rotaries[index].turned
            entries[number] = one.entry(-1 if index is None else index, turned)
        short, short_norms = dtype == torch.bfloat16, final_norm.weight.dtype == torch.bfloat16
        shape = DecoderShape(
            layer=entries, embedding=embedding.data_ptr(), final_norm=final_norm.weight.data_ptr(),
            layers=len(supported), hidden=spec.hidden_size, heads=heads[0], kv_heads=heads[1],
            dim=spec.head_dim, ffn=ffn, is_short=short, short_norms=short_norms,
            wide=short and not short_norms, shared=kernels.SHARED, eps=final_norm.eps,
        )  # fmt: skip
        return cls(shape, entries, rotaries, embedding, most)

    def __call__(self, ids: Tensor, positions: Tensor, attend: NativeStep) -> Tensor:
        """ids, positions [tokens] -> the final norm's output [tokens, hidden]."""
        like, native = self._like, attend.native
        if self._work is None:
            self._work = like.new_empty(self.most * native.decode_work(self._shape))
        out = like.new_empty(len(ids), like.shape[1])
        angles, rows = self._angles_of(positions)
        if not native.decode(
            ctypes.byref(self._shape), ids.data_ptr(), rows.data_ptr(), attend.passes(like.dtype),
            attend.pools, attend.sinks, angles.cosines, angles.sines, out.data_ptr(), self._work.data_ptr(),
        ):  # fmt: skip
            raise MemoryError(f"a pass of {len(ids)} tokens")
        return out

    def _angles_of(self, positions: Tensor) -> tuple[_Angles, Tensor]:
        """Angles, and the rows in them for `positions`."""
        reach, (least, most) = max(positions.tolist()) + 1, ANGLES
        if reach > most:
            return self._computed(positions), self._first
        if reach > self._angles.length:
            self._angles = self._computed(torch.arange(max(least, 1 << (reach - 1).bit_length())))
        return self._angles, positions

    def _computed(self, positions: Tensor) -> _Angles:
        pairs = [rotary.angles(positions, self._like.dtype) for rotary in self._rotaries]
        return _Angles(pairs, len(positions))


class _Angles:
    """cosines, sines: a pointer for each rotary embedding; length: the number of positions."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]], length: int) -> None:
        some = c_void_p * len(pairs)
        self.cosines = some(*[cosine.data_ptr() for cosine, _ in pairs])
        self.sines = some(*[sine.data_ptr() for _, sine in pairs])
        self.length, self._pairs = length, pairs


class _Parts(NamedTuple):
    """Parts of a layer: the norms of the hidden state, the norm of heads, and the matrices."""

    norms: list[RMSNorm]
    qk_norm: RMSNorm | None
    linears: list[DenseLinear | Int8Linear]

    @classmethod
    def of(cls, layer: Layer) -> _Parts | None:
        """None if the layer has other parts."""
        mlp, by_head = layer.mlp, layer.qk_norm
        if not isinstance(mlp, GatedMLP) or not mlp.silu:
            return None
        if layer.attention_post_norm is not None or layer.mlp_post_norm is not None:
            return None
        modules = (layer.qkv, layer.output, mlp.gate_up, mlp.down)
        norms = [norm for norm in (layer.attention_norm, layer.mlp_norm) if isinstance(norm, RMSNorm)]
        linears = [linear for linear in modules if isinstance(linear, DenseLinear | Int8Linear)]
        if len(norms) < 2 or len(linears) < len(modules) or not isinstance(by_head, RMSNorm | None):
            return None
        return cls(norms, by_head, linears)

    def entry(self, rope: int, turned: int) -> DecoderLayer:
        qkv, output, gate_up, down = [_matrix(linear) for linear in self.linears]
        return DecoderLayer(
            attention_norm=self.norms[0].weight.data_ptr(), mlp_norm=self.norms[1].weight.data_ptr(),
            qk_norm=None if self.qk_norm is None else self.qk_norm.weight.data_ptr(), qkv=qkv,
            output=output, gate_up=gate_up, down=down, rope=rope, turned=turned,
        )  # fmt: skip


def _matrix(linear: DenseLinear | Int8Linear) -> Matrix:
    assert linear.product is not None
    held = linear.bias, linear.scale if isinstance(linear, Int8Linear) else None
    return Matrix(linear.product.address, *[None if one is None else one.data_ptr() for one in held])
