"""Decoder: the one decoder-only transformer, shaped by a ModelSpec and its family's names.

Knows layers and the order they come in; attention is handed to it, sampling and scheduling are not its
business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.attention.base import AttentionStep
from runtime.config.family import ARCHITECTURES, Names
from runtime.config.model import ModelSpec
from runtime.config.shards import Shard
from runtime.layers.linear import Linear, LinearMethod, Projection
from runtime.layers.mlp import SwiGLU
from runtime.layers.moe import Experts
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import Rotary
from runtime.layers.sharded import Embedding, Gathered, Summed
from runtime.layers.weights import Checkpoint, Weights
from runtime.models.experts import ExpertsLoader
from runtime.parallel import ALONE, Group
from runtime.protocol.errors import ModelLoadError


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    attention_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    output: Linear
    mlp_norm: RMSNorm
    mlp: Callable[[Tensor], Tensor]


class Decoder:
    """Runs flat batches of tokens. Made by load(). `shard`: what of it is here; the ranks that hold the rest
    run the same batches."""

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        embedding: Embedding,
        layers: list[Layer],
        final_norm: RMSNorm,
        head: Linear,
    ) -> None:
        self.spec, self.shard = spec, shard
        self._embedding, self._layers, self._final_norm, self._head = embedding, layers, final_norm, head
        self._rotary = Rotary(spec.rope, spec.head_dim, self.device)
        # Heads that the rotary embedding turns.
        self._turned = len(shard.heads(spec)) + len(shard.kv_heads(spec))

    @property
    def device(self) -> torch.device:
        return self._embedding.table.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.table.dtype

    def hidden(
        self, ids: Tensor, positions: Tensor, attend: AttentionStep, wanted: Tensor | None = None
    ) -> Tensor:
        """ids, positions [tokens] -> the last layer's normalised output [wanted or tokens, hidden].

        `wanted`: indices of the tokens whose output is needed; the others still write their keys and values.
        """
        x = self._embedding(ids)
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
        group: Group = ALONE,
    ) -> Decoder:
        """Read the weights of `directory` as `dtype` onto `device`, the matrices by `method`: those that this
        rank of the group holds. Raises ModelLoadError."""
        with Checkpoint(directory, progress=group.rank == 0) as checkpoint:
            names: Names = ARCHITECTURES.load(spec.architecture).names
            shard = Shard(group.rank, group.size)
            weights = Weights(checkpoint, dtype, device)
            decoder = _Loader(weights, spec, names, method, group, shard).decoder()
            checkpoint.finish(names.ignored)
        return decoder


@dataclass(frozen=True, slots=True)
class _Loader:
    """Fills a Decoder from a checkpoint, one tensor at a time, so that no second copy of all weights ever
    exists. Of a tensor that ranks share only the own part is read."""

    weights: Weights
    spec: ModelSpec
    names: Names
    method: LinearMethod
    group: Group
    shard: Shard

    def decoder(self) -> Decoder:
        spec = self.spec
        embedding = self._embedding()
        layers = [self._layer(number) for number in range(spec.num_layers)]
        final_norm = RMSNorm(self.weights.tensor(self.names.final_norm, (spec.hidden_size,)), spec.norm_eps)
        return Decoder(spec, self.shard, embedding, layers, final_norm, self._head(embedding))

    def _embedding(self) -> Embedding:
        spec, own = self.spec, self.shard.vocab(self.spec)
        try:
            table = self.weights.tensor(
                self.names.embedding, (spec.vocab_size, spec.hidden_size), self._part(own)
            )
            return Embedding(table, own.start, self.group)
        except ModelLoadError as error:
            raise ModelLoadError(
                error.message, where=error.where, hint=error.hint or "is vocab_size in config.json right?"
            ) from error

    def _part(self, own: range) -> range | None:
        """What is read of a tensor that the ranks share: with one rank all, as it is."""
        return own if self.group.size > 1 else None

    def _head(self, embedding: Embedding) -> Linear:
        own = self.shard.vocab(self.spec)
        head = self._own_head(embedding.table, self._part(own))
        return Gathered(head, own, self.spec.vocab_size, self.group) if self.group.size > 1 else head

    def _own_head(self, table: Tensor, own: range | None) -> Linear:
        spec, head = self.spec, self.names.head
        if not spec.tie_embeddings:
            parts = (Projection(head, spec.vocab_size, own),)
            return self.method.load(self.weights, parts, spec.hidden_size, bias=False)
        name = f"{head}.weight"
        if name in self.weights:  # some checkpoints repeat the shared matrix
            given = self.weights.take(name, (spec.vocab_size, spec.hidden_size), own)
            if not torch.equal(given.to(self.weights.dtype), table.cpu()):
                raise ModelLoadError(
                    f"{name!r} differs from {self.names.embedding!r}, but config.json ties them",
                    where=self.weights.path_of(name),
                    hint="set tie_word_embeddings to false to use both",
                )
        return self.method.shared(table)

    def _layer(self, number: int) -> Layer:
        spec, names = self.spec, self.names
        hidden, ffn = spec.hidden_size, spec.ffn_size
        heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        own_heads = _elements(self.shard.heads(spec), spec.head_dim)
        own_kv = _elements(self.shard.kv_heads(spec), spec.head_dim)
        own_ffn = self.shard.ffn(spec)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(self.weights.tensor(name.format(layer=number), (hidden,)), spec.norm_eps)

        def outputs(bias: bool, *parts: tuple[str, int, range]) -> Linear:
            """Of the hidden state; those of this rank."""
            named = [
                Projection(name.format(layer=number), size, self._part(own)) for name, size, own in parts
            ]
            return self.method.load(self.weights, named, hidden, bias=bias)

        return Layer(
            attention_norm=norm(names.attention_norm),
            qkv=outputs(
                spec.qkv_bias,
                (names.query, heads, own_heads),
                (names.key, kv, own_kv),
                (names.value, kv, own_kv),
            ),
            qk_norm=self._qk_norm(number) if spec.qk_norm else None,
            output=self._to_hidden(names.output.format(layer=number), heads, own_heads, spec.output_bias),
            mlp_norm=norm(names.mlp_norm),
            mlp=self._experts(number)
            or SwiGLU(
                outputs(spec.mlp_bias, (names.gate, ffn, own_ffn), (names.up, ffn, own_ffn)),
                self._to_hidden(names.down.format(layer=number), ffn, own_ffn, spec.mlp_bias),
            ),
        )

    def _experts(self, number: int) -> Experts | None:
        experts = self.spec.experts
        if experts is None or not experts.layers[number]:
            return None
        names, hidden = self.names.experts, self.spec.hidden_size
        return ExpertsLoader(self.weights, experts, names, hidden, self.method, self.group, self.shard).layer(
            number
        )

    def _to_hidden(self, name: str, inputs: int, own: range, bias: bool) -> Linear:
        """A projection of `inputs` of which this rank has its own: the ranks' results are added up."""
        hidden, parts = self.spec.hidden_size, (Projection(name, self.spec.hidden_size),)
        if self.group.size == 1:
            return self.method.load(self.weights, parts, inputs, bias=bias)
        added = self.weights.tensor(f"{name}.bias", (hidden,)) if bias else None
        part = self.method.load(self.weights, parts, inputs, bias=False, own=own)
        return Summed(part, added, self.group)

    def _qk_norm(self, number: int) -> RMSNorm:
        """One norm for query and key heads side by side: weight [heads + kv_heads, head_dim]."""
        spec, names, shard = self.spec, self.names, self.shard
        weights = [
            self.weights.tensor(name.format(layer=number), (spec.head_dim,)).expand(len(heads), -1)
            for name, heads in (
                (names.query_norm, shard.heads(spec)),
                (names.key_norm, shard.kv_heads(spec)),
            )
        ]
        return RMSNorm(torch.cat(weights), spec.norm_eps)


def _elements(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
