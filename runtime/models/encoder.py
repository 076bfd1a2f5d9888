"""Encoder: the one bidirectional transformer with absolute positions and norms after the residual sums,
shaped by an EncoderSpec and its family's names.

Knows layers and their order; how its outputs become a vector is not its business.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.config.encoder import ENCODERS, EncoderFamily, EncoderSpec, Head
from runtime.layers.linear import Linear, LinearMethod, Projection
from runtime.layers.mlp import ACTIVATION, Activation
from runtime.layers.norm import LayerNorm
from runtime.layers.weights import Checkpoint, Weights


@dataclass(frozen=True, slots=True, eq=False)
class EncoderLayer:
    qkv: Linear
    output: Linear
    attention_norm: LayerNorm
    up: Linear
    down: Linear
    mlp_norm: LayerNorm


@dataclass(frozen=True, slots=True, eq=False)
class Classifier:
    dense: Linear
    activation: Activation
    out: Linear

    def __call__(self, first: Tensor) -> Tensor:
        """The first tokens' outputs [texts, hidden] -> [texts, labels]."""
        return self.out(self.activation(self.dense(first)))


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingTables:
    """token_types: None if the model has no segments."""

    tokens: Tensor
    positions: Tensor
    token_types: Tensor | None
    norm: LayerNorm


class TextBatch:
    """Texts concatenated without padding: ids, token types and positions [tokens], and the start of each
    text.

    Attention needs them stacked: `spread` pads, `gather` removes the padding. Texts of equal length need
    neither.
    """

    def __init__(
        self,
        spec: EncoderSpec,
        texts: Sequence[Sequence[int]],
        kinds: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        """kinds: token types of each text; empty means all 0."""
        self.lengths = [len(text) for text in texts]
        self.count, self.longest = len(texts), max(self.lengths)
        self.starts = [0, *itertools.accumulate(self.lengths)][:-1]

        def flat(parts: Sequence[Sequence[int]]) -> Tensor:
            return torch.tensor(list(itertools.chain.from_iterable(parts)), dtype=torch.int64, device=device)

        self.ids = flat(texts)
        self.kinds = flat([kind or [0] * len(text) for text, kind in zip(texts, kinds, strict=True)])
        self.positions = flat([_positions(spec, text) for text in texts])
        self._padded_index: Tensor | None = None
        self.mask: Tensor | None = None
        if min(self.lengths) < self.longest:
            lengths = torch.tensor(self.lengths, device=device)
            there = torch.arange(self.longest, device=device) < lengths[:, None]
            self._padded_index = there.flatten().nonzero().squeeze(1)
            self.mask = there[:, None, None, :]

    def spread(self, x: Tensor) -> Tensor:
        """[tokens, ...] -> [texts, longest, ...], with zeros after the end of each text."""
        if self._padded_index is None:
            return x.reshape(self.count, self.longest, *x.shape[1:])
        padded = x.new_zeros(self.count * self.longest, *x.shape[1:])
        padded[self._padded_index] = x
        return padded.reshape(self.count, self.longest, *x.shape[1:])

    def gather(self, x: Tensor) -> Tensor:
        """[texts, longest, ...] -> [tokens, ...]."""
        x = x.reshape(self.count * self.longest, *x.shape[2:])
        return x if self._padded_index is None else x[self._padded_index]


def _positions(spec: EncoderSpec, text: Sequence[int]) -> Sequence[int]:
    if not spec.counts_from_pad:
        return range(len(text))
    pad = spec.pad_id
    if pad not in text:
        return range(pad + 1, pad + 1 + len(text))
    seen, positions = pad, []
    for token in text:
        seen += token != pad
        positions.append(pad if token == pad else seen)
    return positions


class Encoder:
    """Runs flat batches of whole texts. Created by load()."""

    def __init__(
        self,
        spec: EncoderSpec,
        tables: EmbeddingTables,
        layers: list[EncoderLayer],
        classifier: Classifier | None,
    ) -> None:
        self.spec, self.classifier = spec, classifier
        self._tables, self._layers = tables, layers
        self._activation = ACTIVATION[spec.activation]

    @property
    def device(self) -> torch.device:
        return self._tables.tokens.device

    def hidden(self, batch: TextBatch) -> Tensor:
        """The last layer's output [tokens, hidden]."""
        tables = self._tables
        x = F.embedding(batch.ids, tables.tokens) + F.embedding(batch.positions, tables.positions)
        if tables.token_types is not None:
            x = x + F.embedding(batch.kinds, tables.token_types)
        x = tables.norm(x)
        for layer in self._layers:
            x = layer.attention_norm(x + layer.output(self._attention(layer, x, batch)))
            x = layer.mlp_norm(x + layer.down(self._activation(layer.up(x))))
        return x

    def _attention(self, layer: EncoderLayer, x: Tensor, batch: TextBatch) -> Tensor:
        qkv = layer.qkv(x).unflatten(-1, (3, self.spec.num_heads, self.spec.head_dim))
        # [texts, longest, 3, heads, dim] -> three of [texts, heads, longest, dim]
        query, key, value = batch.spread(qkv).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=batch.mask)
        return batch.gather(attended.transpose(1, 2)).flatten(1)

    @classmethod
    def load(
        cls,
        directory: Path,
        spec: EncoderSpec,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod,
    ) -> Encoder:
        """Read the weights of `directory` as `dtype` onto `device`, with the matrices loaded by `method`.
        Raises ModelLoadError."""
        with Checkpoint(directory) as checkpoint:
            family: EncoderFamily = ENCODERS.load(spec.architecture)
            # A model without a head is saved without the prefix, one with a head with it; the head has none.
            bare = f"{family.names.tokens}.weight" in checkpoint
            weights = Weights(checkpoint, dtype, device, "" if bare else family.prefix)
            encoder = _Loader(weights, spec, family, method).encoder()
            checkpoint.finish(family.names.ignored)
        return encoder


@dataclass(frozen=True, slots=True)
class _Loader:
    """Fills an Encoder from a checkpoint, one tensor at a time."""

    weights: Weights
    spec: EncoderSpec
    family: EncoderFamily
    method: LinearMethod

    def encoder(self) -> Encoder:
        spec, names = self.spec, self.family.names
        tables = EmbeddingTables(
            self._table(names.tokens, spec.vocab_size),
            self._table(names.positions, spec.table_positions),
            self._table(names.token_types, spec.token_types)
            if names.token_types and spec.token_types
            else None,
            self._norm(names.embedding_norm),
        )
        layers = [self._layer(number) for number in range(spec.num_layers)]
        head = self.family.head
        return Encoder(spec, tables, layers, None if head is None else self._classifier(head))

    def _layer(self, number: int) -> EncoderLayer:
        spec, names = self.spec, self.family.names
        hidden, ffn = spec.hidden_size, spec.ffn_size

        def linear(inputs: int, outputs: int, *parts: str) -> Linear:
            return self._linear(inputs, outputs, *(part.format(layer=number) for part in parts))

        return EncoderLayer(
            qkv=linear(hidden, hidden, names.query, names.key, names.value),
            output=linear(hidden, hidden, names.output),
            attention_norm=self._norm(names.attention_norm.format(layer=number)),
            up=linear(hidden, ffn, names.up),
            down=linear(ffn, hidden, names.down),
            mlp_norm=self._norm(names.mlp_norm.format(layer=number)),
        )

    def _classifier(self, head: Head) -> Classifier:
        hidden = self.spec.hidden_size
        return Classifier(
            self._linear(hidden, hidden, head.dense),
            ACTIVATION[head.activation],
            self._linear(hidden, self.spec.labels, head.out),
        )

    def _linear(self, inputs: int, outputs: int, *parts: str) -> Linear:
        """outputs: per part."""
        return self.method.load(
            self.weights, [Projection(part, outputs) for part in parts], inputs, bias=True
        )

    def _norm(self, name: str) -> LayerNorm:
        size = (self.spec.hidden_size,)
        # The oldest checkpoints use gamma and beta.
        scale, shift = ("gamma", "beta") if f"{name}.gamma" in self.weights else ("weight", "bias")
        weight, bias = (self.weights.tensor(f"{name}.{end}", size) for end in (scale, shift))
        return LayerNorm(weight, bias, self.spec.norm_eps)

    def _table(self, name: str, rows: int) -> Tensor:
        return self.weights.tensor(f"{name}.weight", (rows, self.spec.hidden_size))
