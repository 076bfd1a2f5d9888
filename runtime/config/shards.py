"""Shard: the part of a decoder on each of several ranks (tensor parallelism). Heads, the feed-forward's
width and the vocabulary are divided into consecutive ranges. If there are more ranks than key and value
heads, several ranks hold the same one."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.model import ModelSpec
from runtime.protocol.errors import BadRequest


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of rank `rank` of `size`, for a decoder that check_ranks() accepts."""

    rank: int = 0
    size: int = 1

    def heads(self, spec: ModelSpec) -> range:
        each = spec.num_heads // self.size
        return range(self.rank * each, (self.rank + 1) * each)

    def kv_heads(self, spec: ModelSpec) -> range:
        """The key and value heads of its query heads."""
        first = self.rank * spec.num_kv_heads // self.size
        return range(first, first + max(1, spec.num_kv_heads // self.size))

    def ffn(self, spec: ModelSpec) -> range:
        return self.part(spec.ffn_size)

    def part(self, width: int) -> range:
        """The part of a feed-forward of this width."""
        return range(self.rank * width // self.size, (self.rank + 1) * width // self.size)

    def vocab(self, spec: ModelSpec) -> range:
        """All ranks have parts of equal length, except the last ones."""
        each = -(-spec.vocab_size // self.size)
        return range(min(self.rank * each, spec.vocab_size), min((self.rank + 1) * each, spec.vocab_size))


def check_ranks(spec: ModelSpec, size: int) -> None:
    """Raise BadRequest if `size` ranks cannot share the model."""
    heads, kv = spec.num_heads, spec.num_kv_heads
    possible = [n for n in range(1, heads + 1) if heads % n == 0 and (kv % n == 0 or n % kv == 0)]
    if size not in possible:
        raise BadRequest(
            f"{size} ranks cannot share {heads} attention heads over {kv} key and value heads",
            where="tp_size",
            hint=f"possible for this model: {', '.join(map(str, possible))}",
        )
    last = Shard(size - 1, size)
    widths = [spec.ffn_size]
    if spec.experts is not None:
        widths += [spec.experts.width] + [spec.experts.shared_width] * (spec.experts.shared_width > 0)
    if not last.vocab(spec) or min(widths) < size:
        raise BadRequest(f"the model is too small for {size} ranks", where="tp_size")
