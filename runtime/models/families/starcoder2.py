"""StarCoder 2 (arXiv 2402.19173): LayerNorm, a plain feed-forward, biases everywhere. Data only."""

from __future__ import annotations

from runtime.config.family import Family, Names, Rope, Traits
from runtime.config.fields import Fields


def _traits(fields: Fields, layers: int) -> Traits:
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    bias = fields.flag("use_bias", True)
    return Traits(
        windows=(window,) * layers,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        norm="layer",
        norm_bias=True,
        gated=False,
    )


FAMILY = Family(
    _traits,
    Names(up="model.layers.{layer}.mlp.c_fc", down="model.layers.{layer}.mlp.c_proj"),
    rope=Rope(theta=10000.0),
    renamed={"rms_norm_eps": "norm_epsilon"},
    defaults={"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "tie_word_embeddings": True},
)
