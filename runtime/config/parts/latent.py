"""Latent: the shape of multi-head latent attention, as data, and the names of its tensors. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass

from runtime.config.fields import Fields


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values of all heads are computed
    from one short vector per token, the latent. In addition a token has one key with a rotary embedding,
    shared by all heads.

    rank: length of the latent. turned: of the rotary key, and of each query head's part for it. plain: of the
    other part of a query head. value: of a value head. query_rank: length of the vector that queries are
    computed from; None: they are computed from the hidden state.
    """

    rank: int
    turned: int
    plain: int
    value: int
    query_rank: int | None

    @property
    def query(self) -> int:
        """Length of a query head in the checkpoint."""
        return self.plain + self.turned

    @property
    def kept(self) -> int:
        """Numbers per token in the KV pool, the length of the keys that query heads are multiplied with."""
        return self.turned + self.rank


@dataclass(frozen=True, slots=True)
class LatentNames:
    """Names of tensors; projections are given without their `.weight` or `.bias`. The output projection, and
    the query's if it has no latent, have their usual names."""

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
    """The factor of scores. With a stretched rotary embedding it grows as that embedding's cosines do (arXiv
    2309.00071, section 3.4)."""
    scale = 1 / math.sqrt(latent.query)
    rope = fields.child("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    stretched = rope.text("rope_type", rope.text("type", "default")) != "default"
    growth = rope.number("mscale_all_dim", 0.0, above=-1.0)
    if not stretched or not growth or (factor := rope.number("factor")) <= 1.0:
        return scale
    return scale * (0.1 * growth * math.log(factor) + 1.0) ** 2
