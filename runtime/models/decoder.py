"""Decoder: the one decoder-only transformer, shaped by a ModelSpec and its family's names.

Knows layers and the order they come in; attention is handed to it, sampling and scheduling are not its
business.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.attention.base import AttentionStep
from runtime.config.family import ARCHITECTURES, Names
from runtime.config.model import ModelSpec
from runtime.layers.dense import Linear
from runtime.layers.mlp import SwiGLU
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rotary
from runtime.layers.weights import Checkpoint
from runtime.protocol.errors import ModelLoadError


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    attention_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    mlp: SwiGLU


class Decoder:
    """Runs flat batches of tokens. Made by load()."""

    def __init__(
        self, spec: ModelSpec, embedding: Tensor, layers: list[Layer], final_norm: RMSNorm, head: Linear
    ) -> None:
        self.spec = spec
        self._embedding, self._layers, self._final_norm, self._head = embedding, layers, final_norm, head
        self._rotary = Rotary(spec.rope, spec.head_dim, embedding.device)
        self._turned = spec.num_heads + spec.num_kv_heads  # heads that the rotary embedding turns

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def linears(self) -> list[Linear]:
        """All products of a pass, in their order."""
        layers = [(one.qkv, one.output, one.mlp.gate_up, one.mlp.down) for one in self._layers]
        return [*itertools.chain.from_iterable(layers), self._head]

    def hidden(
        self, ids: Tensor, positions: Tensor, attend: AttentionStep, wanted: Tensor | None = None
    ) -> Tensor:
        """ids, positions [tokens] -> the last layer's normalised output [wanted or tokens, hidden].

        `wanted`: indices of the tokens whose output is needed; the others still write their keys and values.
        """
        x = F.embedding(ids, self._embedding)
        cos, sin = self._rotary.angles(positions, x.dtype)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attention(index, layer, layer.attention_norm(x), cos, sin, attend)
            if index == last and wanted is not None:
                attended, x = attended[wanted], x[wanted]
            x = x.add_(layer.output(attended))
            x = x.add_(layer.mlp(layer.mlp_norm(x)))
        return self._final_norm(x)

    def _attention(
        self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: AttentionStep
    ) -> Tensor:
        qkv = layer.qkv(x).unflatten(-1, (-1, self.spec.head_dim))
        turned = qkv[:, : self._turned]
        if layer.qk_norm is not None:
            turned.copy_(layer.qk_norm(turned))
        Rotary.turn_(turned, cos, sin)
        return attend(index, qkv)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] float32."""
        return self._head(hidden).float()

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[rows, hidden], ids [n] int64 -> [rows, n] float32: the logits of these ids alone."""
        return self._head.some(hidden, ids).float()

    @classmethod
    def load(
        cls, directory: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, *, pack: bool = False
    ) -> Decoder:
        """Read the weights of `directory` as `dtype` onto `device`. `pack`: see Linear. Raises
        ModelLoadError."""
        with Checkpoint(directory) as checkpoint:
            return _Loader(checkpoint, spec, dtype, device, pack).decoder()


class _Loader:
    """Fills a Decoder from a checkpoint, one tensor at a time, so that no second copy of all weights ever
    exists."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, dtype: torch.dtype, device: torch.device, pack: bool
    ) -> None:
        self._checkpoint, self._spec, self._dtype, self._device, self._pack = (
            checkpoint,
            spec,
            dtype,
            device,
            pack,
        )
        self._names: Names = ARCHITECTURES.load(spec.architecture).names

    def decoder(self) -> Decoder:
        spec, names = self._spec, self._names
        embedding = self._embedding(names.embedding)
        layers = [self._layer(number) for number in range(spec.num_layers)]
        final_norm = RMSNorm(self._vector(names.final_norm, spec.hidden_size), spec.norm_eps)
        head = Linear(self._head(embedding), pack=self._pack)
        self._checkpoint.finish(names.ignored)
        return Decoder(spec, embedding, layers, final_norm, head)

    def _embedding(self, name: str) -> Tensor:
        spec = self._spec
        try:
            return self._matrix((name,), (spec.vocab_size,), spec.hidden_size)
        except ModelLoadError as error:
            raise ModelLoadError(
                error.message, where=error.where, hint=error.hint or "is vocab_size in config.json right?"
            ) from error

    def _head(self, embedding: Tensor) -> Tensor:
        spec, name = self._spec, self._names.head
        if not spec.tie_embeddings:
            return self._matrix((name,), (spec.vocab_size,), spec.hidden_size)
        if name in self._checkpoint:  # some checkpoints repeat the shared matrix
            given = self._checkpoint.take(name, (spec.vocab_size, spec.hidden_size))
            if not torch.equal(given.to(self._dtype), embedding.cpu()):
                raise ModelLoadError(
                    f"{name!r} differs from {self._names.embedding!r}, but config.json ties them",
                    where=self._checkpoint.path_of(name),
                    hint="set tie_word_embeddings to false to use both",
                )
        return embedding

    def _layer(self, number: int) -> Layer:
        spec, names = self._spec, self._names
        heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(self._vector(name.format(layer=number), size), spec.norm_eps)

        def linear(parts: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Linear:
            return self._linear(tuple(part.format(layer=number) for part in parts), rows, columns, bias)

        return Layer(
            attention_norm=norm(names.attention_norm, spec.hidden_size),
            qkv=linear(
                (names.query, names.key, names.value), (heads, kv, kv), spec.hidden_size, spec.qkv_bias
            ),
            qk_norm=self._qk_norm(number) if spec.qk_norm else None,
            output=linear((names.output,), (spec.hidden_size,), heads, spec.output_bias),
            mlp_norm=norm(names.mlp_norm, spec.hidden_size),
            mlp=SwiGLU(
                linear((names.gate, names.up), (spec.ffn_size,) * 2, spec.hidden_size, spec.mlp_bias),
                linear((names.down,), (spec.hidden_size,), spec.ffn_size, spec.mlp_bias),
            ),
        )

    def _qk_norm(self, number: int) -> RMSNorm:
        """One norm for query and key heads side by side: weight [heads + kv_heads, head_dim]."""
        spec, names = self._spec, self._names
        weights = [
            self._vector(name.format(layer=number), spec.head_dim).expand(heads, -1)
            for name, heads in ((names.query_norm, spec.num_heads), (names.key_norm, spec.num_kv_heads))
        ]
        return RMSNorm(torch.cat(weights), spec.norm_eps)

    def _linear(self, parts: tuple[str, ...], rows: tuple[int, ...], columns: int, bias: bool) -> Linear:
        """One Linear out of several of the checkpoint, one above the other."""
        weight = self._matrix(tuple(f"{part}.weight" for part in parts), rows, columns)
        biases = None
        if bias:
            biases = torch.cat([self._vector(f"{part}.bias", count) for part, count in zip(parts, rows)])
        return Linear(weight, biases, pack=self._pack)

    def _matrix(self, names: tuple[str, ...], rows: tuple[int, ...], columns: int) -> Tensor:
        weight = torch.empty(sum(rows), columns, dtype=self._dtype, device=self._device)
        for name, target in zip(names, weight.split(list(rows))):
            target.copy_(self._checkpoint.take(name, target.shape))
        return weight

    def _vector(self, name: str, size: int) -> Tensor:
        return self._checkpoint.take(name, (size,)).to(self._device, self._dtype, copy=True)
