"""Decoder: the one decoder-only transformer, shaped by a ModelSpec and its family's names.

Knows layers and the order they come in; attention is handed to it, sampling and scheduling are not its
business.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.attention.base import AttentionStep
from runtime.config.family import ARCHITECTURES, Names
from runtime.config.model import ModelSpec
from runtime.layers.linear import Linear, LinearMethod, Projection
from runtime.layers.mlp import SwiGLU
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rotary
from runtime.layers.weights import Checkpoint, Weights
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
        cls,
        directory: Path,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod,
    ) -> Decoder:
        """Read the weights of `directory` as `dtype` onto `device`, the matrices by `method`. Raises
        ModelLoadError."""
        with Checkpoint(directory) as checkpoint:
            names: Names = ARCHITECTURES.load(spec.architecture).names
            decoder = _Loader(Weights(checkpoint, dtype, device), spec, names, method).decoder()
            checkpoint.finish(names.ignored)
        return decoder


@dataclass(frozen=True, slots=True)
class _Loader:
    """Fills a Decoder from a checkpoint, one tensor at a time, so that no second copy of all weights ever
    exists."""

    weights: Weights
    spec: ModelSpec
    names: Names
    method: LinearMethod

    def decoder(self) -> Decoder:
        spec = self.spec
        embedding = self._embedding()
        layers = [self._layer(number) for number in range(spec.num_layers)]
        final_norm = RMSNorm(self.weights.tensor(self.names.final_norm, (spec.hidden_size,)), spec.norm_eps)
        return Decoder(spec, embedding, layers, final_norm, self._head(embedding))

    def _embedding(self) -> Tensor:
        spec = self.spec
        try:
            return self.weights.tensor(self.names.embedding, (spec.vocab_size, spec.hidden_size))
        except ModelLoadError as error:
            raise ModelLoadError(
                error.message, where=error.where, hint=error.hint or "is vocab_size in config.json right?"
            ) from error

    def _head(self, embedding: Tensor) -> Linear:
        spec, head = self.spec, self.names.head
        if not spec.tie_embeddings:
            parts = (Projection(head, spec.vocab_size),)
            return self.method.load(self.weights, parts, spec.hidden_size, bias=False)
        name = f"{head}.weight"
        if name in self.weights:  # some checkpoints repeat the shared matrix
            given = self.weights.take(name, (spec.vocab_size, spec.hidden_size))
            if not torch.equal(given.to(self.weights.dtype), embedding.cpu()):
                raise ModelLoadError(
                    f"{name!r} differs from {self.names.embedding!r}, but config.json ties them",
                    where=self.weights.path_of(name),
                    hint="set tie_word_embeddings to false to use both",
                )
        return self.method.shared(embedding)

    def _layer(self, number: int) -> Layer:
        spec, names = self.spec, self.names
        hidden, ffn = spec.hidden_size, spec.ffn_size
        heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim

        def norm(name: str) -> RMSNorm:
            return RMSNorm(self.weights.tensor(name.format(layer=number), (hidden,)), spec.norm_eps)

        def linear(inputs: int, bias: bool, *parts: tuple[str, int]) -> Linear:
            named = [Projection(name.format(layer=number), outputs) for name, outputs in parts]
            return self.method.load(self.weights, named, inputs, bias=bias)

        return Layer(
            attention_norm=norm(names.attention_norm),
            qkv=linear(hidden, spec.qkv_bias, (names.query, heads), (names.key, kv), (names.value, kv)),
            qk_norm=self._qk_norm(number) if spec.qk_norm else None,
            output=linear(heads, spec.output_bias, (names.output, hidden)),
            mlp_norm=norm(names.mlp_norm),
            mlp=SwiGLU(
                linear(hidden, spec.mlp_bias, (names.gate, ffn), (names.up, ffn)),
                linear(ffn, spec.mlp_bias, (names.down, hidden)),
            ),
        )

    def _qk_norm(self, number: int) -> RMSNorm:
        """One norm for query and key heads side by side: weight [heads + kv_heads, head_dim]."""
        spec, names = self.spec, self.names
        weights = [
            self.weights.tensor(name.format(layer=number), (spec.head_dim,)).expand(heads, -1)
            for name, heads in ((names.query_norm, spec.num_heads), (names.key_norm, spec.num_kv_heads))
        ]
        return RMSNorm(torch.cat(weights), spec.norm_eps)
