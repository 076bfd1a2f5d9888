"""Decoder: the one decoder-only transformer, shaped by a ModelSpec and its family's names.

Knows layers and their order. Attention is passed in; sampling and scheduling are not its business.
"""

from __future__ import annotations

import functools
import itertools
import logging
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from runtime.attention.base import AttentionStep, Scoring
from runtime.attention.native_views import NativeStep
from runtime.config.family import ARCHITECTURES, Names
from runtime.config.model import ModelSpec
from runtime.config.shards import Shard
from runtime.layers.dense import DenseLinear
from runtime.layers.latent import LatentHeads, LatentOutput
from runtime.layers.linear import Linear, LinearMethod, Projection
from runtime.layers.mlp import FeedForward, GatedMLP, PlainMLP
from runtime.layers.moe import Experts
from runtime.layers.norm import AllHeadsNorm, LayerNorm, Norm, RMSNorm
from runtime.layers.quantised.choose import open_checkpoint
from runtime.layers.rope import Rotary
from runtime.layers.sharded import Embedding, Gathered, Summed
from runtime.layers.weights import Weights
from runtime.models.experts import ExpertsLoader
from runtime.models.latent import LatentLoader
from runtime.models.layer import Layer
from runtime.models.native_layers import NativeLayers
from runtime.models.vision.tower import VisionTower
from runtime.parallel import ALONE, Group
from runtime.protocol.errors import ModelLoadError

log = logging.getLogger(__name__)


class Decoder:
    """Runs flat batches of tokens. Created by load(). `shard`: the part on this rank; the ranks with the rest
    run the same batches. `scoring`: the options for creating its attention."""

    def __init__(
        self,
        spec: ModelSpec,
        shard: Shard,
        embedding: Embedding,
        positions: Tensor | None,
        layers: list[Layer],
        final_norm: Norm,
        head: Linear,
        tower: VisionTower | None = None,
    ) -> None:
        """positions: table of learned positions [positions, hidden]. tower: computes the tokens of images."""
        self.spec, self.shard, self.tower = spec, shard, tower
        self._embedding, self._positions = embedding, positions
        self._layers, self._final_norm, self._head = layers, final_norm, head
        sinks = tuple(layer.sinks for layer in layers if layer.sinks is not None)
        self.scoring = Scoring(spec.attention_scale, spec.attention_softcap, sinks)
        ropes = dict.fromkeys(rope for rope in spec.ropes if rope is not None)
        self._rotaries = [Rotary(rope, spec.head_dim, self.device) for rope in ropes]
        numbers = {rope: number for number, rope in enumerate(ropes)}
        self._rotary_of = [None if rope is None else numbers[rope] for rope in spec.ropes]
        self._heads, self._kv_heads = len(shard.heads(spec)), len(shard.kv_heads(spec))
        self._grows_turned = spec.query_growth is not None and spec.query_growth.turned
        # Heads that the rotary embedding rotates.
        self._turned = self._heads + self._kv_heads
        # In the embedding's dtype, as the families with a scale do.
        self._scale = torch.tensor(spec.embedding_scale, dtype=self.dtype, device=self.device)

    @property
    def device(self) -> torch.device:
        return self._embedding.table.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.table.dtype

    @property
    def is_empty(self) -> bool:
        """Whether it is a placeholder without weights."""
        return not self._layers

    @functools.cached_property
    def _native(self) -> NativeLayers | None:
        """For passes of few tokens. Created with the first one, when the faster products are known."""
        heads, table = (self._heads, self._kv_heads), self._embedding.table
        return NativeLayers.of(
            self.spec, table, self._layers, self._final_norm, heads, self._rotaries, self._rotary_of
        )

    def without_weights(self) -> Decoder:
        """A decoder of the same shape that computes nothing: a placeholder while the memory is released.
        Small parts are kept."""
        none = self._embedding.table.new_empty((0, self.spec.hidden_size))
        embedding, head = Embedding(none, 0, ALONE), DenseLinear(none)
        decoder = Decoder(self.spec, self.shard, embedding, None, [], self._final_norm, head, self.tower)
        decoder.scoring = self.scoring
        return decoder

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor,
        attend: AttentionStep,
        output_indices: Tensor | None = None,
        embedded: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """ids [tokens], positions [tokens] or [3, tokens] (see Rotary) -> the last layer's normalised output
        [output_indices or tokens, hidden]. output_indices: the tokens whose output is needed. embedded:
        indices of tokens that stand for other inputs, and the embeddings of these [indices, hidden]."""
        native = self._native if embedded is None and positions.dim() == 1 else None
        if native is not None and isinstance(attend, NativeStep) and len(ids) <= native.most:
            result = native(ids, positions, attend)
            return result if output_indices is None else result[output_indices]
        x = self._embedding(ids)
        if embedded is not None:
            x[embedded[0]] = embedded[1].to(x.dtype)
        if self.spec.embedding_scale != 1.0:
            x = x.mul_(self._scale)
        if self._positions is not None:
            x = x.add_(F.embedding(positions, self._positions))
        angles = [rotary.angles(positions, x.dtype) for rotary in self._rotaries]
        step = _Step(attend, angles, self._query_growth(positions))
        last = len(self._layers) - 1
        behind = [*(layer.attention_norm for layer in self._layers[1:]), self._final_norm]
        normed = _normed(x, self._layers[0].attention_norm)
        for index, (layer, norm) in enumerate(zip(self._layers, behind, strict=True)):
            attended = self._attention(index, layer, normed, step)
            if index == last and output_indices is not None:
                attended, x = attended[output_indices], x[output_indices]
            added = layer.output(attended)
            if self.spec.parallel:
                # From x before attention's output is added.
                more = layer.mlp(_normed(x, layer.mlp_norm))
                self._added(x, added, layer.attention_post_norm, None)
            else:
                more = layer.mlp(self._added(x, added, layer.attention_post_norm, layer.mlp_norm))
            normed = self._added(x, more, layer.mlp_post_norm, norm)
        return normed

    def _added(self, x: Tensor, more: Tensor, post: Norm | None, norm: Norm | None) -> Tensor:
        """Add `more`, normalised by `post`, to x in place; returns the sum normalised by `norm`."""
        if post is not None:
            more = post(more)
        if isinstance(norm, RMSNorm) and self.spec.residual_scale == 1.0:
            return norm.of_sum(x, more)
        return _normed(x.add_(more, alpha=self.spec.residual_scale), norm)

    def _query_growth(self, positions: Tensor) -> Tensor | None:
        """The factors of queries, [tokens, 1, 1]."""
        growth = self.spec.query_growth
        if growth is None:
            return None
        steps = torch.floor((positions.float() + growth.shift) / growth.every)
        factors = 1 + growth.beta * torch.log1p(steps)
        return factors.to(self.dtype)[:, None, None]

    def _attention(self, index: int, layer: Layer, x: Tensor, step: _Step) -> Tensor:
        qkv = layer.qkv(x)
        if self.spec.qkv_by_head:
            # [tokens, heads, query key value, head_dim] -> query heads, key heads, value heads
            by_head = qkv.unflatten(-1, (self._heads, 3, self.spec.head_dim))
            qkv = by_head.transpose(1, 2).flatten(1, 2)
        else:
            qkv = qkv.unflatten(-1, (-1, self.spec.head_dim))
        turned = qkv[:, : self._turned]
        if layer.qk_norm is not None:
            turned.copy_(layer.qk_norm(turned))
        number = self._rotary_of[index]
        if number is not None:
            self._rotaries[number].turn_(turned, *step.angles[number])
        if step.query_growth is not None and (number is None or self._grows_turned):
            qkv[:, : self._heads].mul_(step.query_growth)
        return step.attend(index, qkv)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] -> [rows, vocab] float32."""
        return self._capped(self._head(hidden).float())

    def logits_of(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[rows, hidden], ids [n] int64 -> [rows, n] float32: the logits of these ids only."""
        return self._capped(self._head.some(hidden, ids).float())

    def _capped(self, logits: Tensor) -> Tensor:
        spec = self.spec
        if spec.logit_scale != 1.0:
            logits = logits * spec.logit_scale
        if spec.logit_softcap is not None:
            logits = torch.tanh(logits / spec.logit_softcap) * spec.logit_softcap
        return logits

    @classmethod
    def load(
        cls,
        directory: Path,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        method: LinearMethod,
        group: Group = ALONE,
        *,
        dummy: bool = False,
    ) -> Decoder:
        """Read the weights of `directory` as `dtype` onto `device`, with the matrices loaded by `method`:
        only this rank's part. dummy: random weights instead. Raises ModelLoadError."""
        random = device if dummy else None
        with open_checkpoint(directory, spec, progress=group.rank == 0, dummy=random) as checkpoint:
            names: Names = ARCHITECTURES.load(spec.architecture).names
            shard = Shard(group.rank, group.size)
            weights = Weights(checkpoint, dtype, device, names.prefix, names.transposed, names.within)
            decoder = _Loader(weights, spec, names, method, group, shard).decoder()
            if names.beside and group.rank == 0:
                log.info("of %s the text model is loaded, nothing else", spec.architecture)
            behind = range(spec.num_layers, spec.num_layers + spec.further_layers)
            further = (names.further.format(layer=layer) for layer in behind)
            checkpoint.finish(names.ignored, (*names.beside, *further))
        return decoder


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """Values that all layers of a pass share. angles: of each rotary embedding; query_growth [tokens, 1,
    1]."""

    attend: AttentionStep
    angles: list[tuple[Tensor, Tensor]]
    query_growth: Tensor | None


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    return x if norm is None else norm(x)


class _Loader(ExpertsLoader, LatentLoader):
    """Fills a Decoder from a checkpoint, one tensor at a time, so that there is never a second copy of all
    weights."""

    def decoder(self) -> Decoder:
        spec, names = self.spec, self.names
        embedding = self._embedding()
        positions = None
        if spec.learned_positions:
            size = (spec.max_position_embeddings, spec.hidden_size)
            positions = self.weights.tensor(names.positions, size)
        layers = [self._layer(number) for number in range(spec.num_layers)]
        final_norm = self._norm(names.final_norm)
        head = self._head(embedding)
        # Every rank has the whole tower: it is small compared with the decoder.
        tower = None if spec.vision is None else VisionTower.load(self.weights, spec.vision)
        return Decoder(spec, self.shard, embedding, positions, layers, final_norm, head, tower)

    def _norm(self, name: str) -> Norm:
        """A norm of the hidden state."""
        return self._norm_of(self.weights.tensor(name, (self.spec.hidden_size,)), name)

    def _norm_of(self, weight: Tensor, name: str) -> Norm:
        """weight [..., size], whose name in the checkpoint is `name`."""
        spec = self.spec
        match spec.norm:
            case "rms":
                return RMSNorm(weight, spec.norm_eps)
            case "rms_plus_one":
                return RMSNorm(weight.float() + 1, spec.norm_eps)
            case "layer":
                bias = name.removesuffix("weight") + "bias"
                size = (weight.shape[-1],)
                return LayerNorm(
                    weight, self.weights.tensor(bias, size) if spec.norm_bias else None, spec.norm_eps
                )
            case _:
                raise ValueError(f"unknown norm {spec.norm!r}")

    def _embedding(self) -> Embedding:
        spec, local = self.spec, self.shard.vocab(self.spec)
        try:
            table = self.weights.tensor(
                self.names.embedding, (spec.vocab_size, spec.hidden_size), self.part(local)
            )
            return Embedding(table, local.start, self.group)
        except ModelLoadError as error:
            raise ModelLoadError(
                error.message, where=error.where, hint=error.hint or "is vocab_size in config.json right?"
            ) from error

    def _head(self, embedding: Embedding) -> Linear:
        local = self.shard.vocab(self.spec)
        head = self._local_head(embedding.table, self.part(local))
        return Gathered(head, local, self.spec.vocab_size, self.group) if self.group.size > 1 else head

    def _local_head(self, table: Tensor, local: range | None) -> Linear:
        spec, head = self.spec, self.names.head
        if not spec.tie_embeddings:
            parts = (Projection(head, spec.vocab_size, local),)
            return self.method.load(self.weights, parts, spec.hidden_size, bias=spec.head_bias)
        name = f"{head}.weight"
        if name in self.weights:  # some checkpoints repeat the shared matrix
            stored = self.weights.take(name, (spec.vocab_size, spec.hidden_size), local)
            if not torch.equal(stored.to(self.weights.dtype), table.cpu()):
                raise ModelLoadError(
                    f"{name!r} differs from {self.names.embedding!r}, but config.json ties them",
                    where=self.weights.path_of(name),
                    hint="set tie_word_embeddings to false to use both",
                )
        return self.method.shared(table)

    def _layer(self, number: int) -> Layer:
        spec, names = self.spec, self.names
        qkv, output = self._around_attention(number)

        def norm(name: str | None) -> Norm | None:
            return None if name is None else self._norm(name.format(layer=number))

        return Layer(
            attention_norm=norm(names.attention_norm),
            qkv=qkv,
            qk_norm=self._qk_norm(number) if spec.qk_norm else None,
            output=output,
            attention_post_norm=norm(names.attention_post_norm),
            mlp_norm=norm(names.mlp_norm),
            mlp=self._experts(number) or self._mlp(number),
            mlp_post_norm=norm(names.mlp_post_norm),
            sinks=self._sinks(number) if spec.sinks else None,
        )

    def _around_attention(self, number: int) -> tuple[Linear | LatentHeads, Linear | LatentOutput]:
        """The projections before and after attention."""
        spec, names, local = self.spec, self.names, self.shard.heads(self.spec)
        output, latent = names.output.format(layer=number), spec.latent
        if latent is None:
            first, size = self._qkv(number), spec.head_dim
            last = self._to_hidden(output, spec.num_heads * size, _elements(local, size), spec.output_bias)
            return first, last
        heads, values = self.latent_layer(number, latent)
        size = latent.value
        last = self._to_hidden(output, spec.num_heads * size, _elements(local, size), spec.output_bias)
        return heads, LatentOutput(latent, values, last)

    def _qkv(self, number: int) -> Linear:
        spec, names = self.spec, self.names
        heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        local_heads = _elements(self.shard.heads(spec), spec.head_dim)
        local_kv = _elements(self.shard.kv_heads(spec), spec.head_dim)
        if spec.qkv_by_head:
            local = _elements(self.shard.heads(spec), 3 * spec.head_dim)
            return self._from_hidden(number, spec.qkv_bias, (names.query, 3 * heads, local))
        return self._from_hidden(
            number,
            spec.qkv_bias,
            (names.query, heads, local_heads),
            (names.key, kv, local_kv),
            (names.value, kv, local_kv),
        )

    def _mlp(self, number: int) -> FeedForward:
        spec, names = self.spec, self.names
        ffn, local, bias = spec.ffn_size, self.shard.ffn(spec), spec.mlp_bias
        up = (names.up, ffn, local)
        gate = [(names.gate, ffn, local)] if spec.gated else []
        inner = self._from_hidden(number, bias, *gate, up)
        down = self._to_hidden(names.down.format(layer=number), ffn, local, bias)
        return (GatedMLP if spec.gated else PlainMLP)(inner, down, spec.activation)

    def _from_hidden(self, number: int, bias: bool, *parts: tuple[str, int, range]) -> Linear:
        """Projections of the hidden state: (name, all outputs, this rank's outputs). Parts with the same name
        are consecutive outputs of one tensor."""
        names, sizes, locals_of_parts = zip(*parts)
        if len(parts) > 1 and len(set(names)) == 1:
            starts = itertools.accumulate(sizes, initial=0)
            total = sum(sizes)
            named = [
                Projection(
                    names[0].format(layer=number), total, range(start + local.start, start + local.stop)
                )
                for start, local in zip(starts, locals_of_parts)
            ]
        else:
            named = [
                Projection(name.format(layer=number), size, self.part(local)) for name, size, local in parts
            ]
        return self.method.load(self.weights, named, self.spec.hidden_size, bias=bias)

    def _sinks(self, number: int) -> Tensor:
        name, local = self.names.sinks.format(layer=number), self.shard.heads(self.spec)
        return self.weights.tensor(name, (self.spec.num_heads,), self.part(local)).float()

    def _experts(self, number: int) -> Experts | None:
        experts = self.spec.experts
        if experts is None or not experts.layers[number]:
            return None
        return self.experts_layer(number, experts)

    def _to_hidden(self, name: str, inputs: int, local: range, bias: bool) -> Linear:
        """A projection of `inputs`, of which this rank has its own; the ranks' results are summed."""
        hidden, parts = self.spec.hidden_size, (Projection(name, self.spec.hidden_size),)
        if self.group.size == 1:
            return self.method.load(self.weights, parts, inputs, bias=bias)
        added = self.weights.tensor(f"{name}.bias", (hidden,)) if bias else None
        part = self.method.load(self.weights, parts, inputs, bias=False, local=local)
        return Summed(part, added, self.group)

    def _qk_norm(self, number: int) -> Norm | None:
        """One norm for query and key heads together: weight [heads + kv_heads, head_dim]."""
        spec, names, shard = self.spec, self.names, self.shard
        if spec.qk_norm_scope == "turned_head":
            weight = torch.ones(spec.head_dim, dtype=self.weights.dtype, device=self.weights.device)
            return None if spec.ropes[number] is None else RMSNorm(weight, spec.norm_eps)
        weights = []
        for name, count, heads in (
            (names.query_norm, spec.num_heads, shard.heads(spec)),
            (names.key_norm, spec.num_kv_heads, shard.kv_heads(spec)),
        ):
            name = name.format(layer=number)
            local = slice(heads.start, heads.stop)
            match spec.qk_norm_scope:
                case "head":
                    weight = self.weights.tensor(name, (spec.head_dim,)).expand(len(heads), -1)
                case "each_head":
                    weight = self.weights.tensor(name, (count, spec.head_dim))[local]
                case "heads":
                    flat = self.weights.tensor(name, (count * spec.head_dim,))
                    weight = flat.view(count, spec.head_dim)[local]
                case _:
                    raise ValueError(f"unknown kind of norm {spec.qk_norm_scope!r}")
            weights.append(weight)
        if spec.qk_norm_scope == "heads":
            return AllHeadsNorm(torch.cat(weights), len(shard.heads(spec)), spec.norm_eps, self.group)
        return self._norm_of(torch.cat(weights), names.query_norm)


def _elements(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
