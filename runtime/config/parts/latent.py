"""Latent: the shape of multi-head latent attention, as data, and the names of its tensors. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.config.fields import Fields


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are made from
    one short vector per token, the latent. Beside it a token has one key that the rotary embedding turns, for
    all heads.

    rank: length of the latent. turned: of the key that is turned, and of each query head's part for it.
    plain: of the part of a query head that is not turned. value: of a value head.
    query_rank: queries too are made from a shorter vector, of this length; None: from the hidden state.
    """

    rank: int
    turned: int
    plain: int
    value: int
    query_rank: int | None

    @property
    def query(self) -> int:
        """Length of a query head as the checkpoint has it."""
        return self.plain + self.turned

    @property
    def kept(self) -> int:
        """Numbers that a token's key has in the KV pool: what a query head is multiplied with."""
        return self.turned + self.rank


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Names of tensors; projections are given without their `.weight` or `.bias`. The output projection and
    the query's without a shorter vector have their usual names."""

    query_down: str = "model.layers.{layer}.self_attn.q_a_proj"
    query_norm: str = "model.layers.{layer}.self_attn.q_a_layernorm.weight"
    query_up: str = "model.layers.{layer}.self_attn.q_b_proj"
    down: str = "model.layers.{layer}.self_attn.kv_a_proj_with_mqa"
    norm: str = "model.layers.{layer}.self_attn.kv_a_layernorm.weight"
    up: str = "model.layers.{layer}.self_attn.kv_b_proj"


def latent_spec(fields: Fields) -> LatentSpec:
    """Raises ModelLoadError."""
    if fields.flag("attention_bias", False):
        raise fields.fail("'attention_bias' true is not supported with latent attention")
    turned = fields.integer("qk_rope_head_dim")
    if turned % 2:
        raise fields.fail(f"'qk_rope_head_dim' must be even for a rotary embedding, got {turned}")
    return LatentSpec(
        rank=fields.integer("kv_lora_rank"),
        turned=turned,
        plain=fields.integer("qk_nope_head_dim"),
        value=fields.integer("v_head_dim"),
        query_rank=fields.integer("q_lora_rank") if fields.has("q_lora_rank") else None,
    )


def latent_scale(fields: Fields, latent: LatentSpec) -> float:
    """Of products of queries and keys. With a stretched rotary embedding it grows as that embedding's cosines
    do (arXiv 2309.00071, section 3.4)."""
    scale = 1 / math.sqrt(latent.query)
    rope = fields.child("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    stretched = rope.text("rope_type", rope.text("type", "default")) != "default"
    growth = rope.number("mscale_all_dim", 0.0, above=-1.0)
    if not stretched or not growth or (factor := rope.number("factor")) <= 1.0:
        return scale
    return scale * (0.1 * growth * math.log(factor) + 1.0) ** 2
