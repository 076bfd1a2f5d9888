"""Cases beside those in conftest.py: families with mixtures of experts, each in small."""

from __future__ import annotations

from typing import Any

from tests.unit.runtime.engine.checkpoints.families import LEFT_OUT

_LATENT = {
    "head_dim": LEFT_OUT, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_routed_experts": 8, "moe_intermediate_size": 24,
}  # fmt: skip
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def _of(family: str, **changes: Any) -> tuple[str, dict[str, Any]]:
    return family, {"num_experts_per_tok": 2, **changes}


EXPERTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": _of("Mixtral", num_local_experts=5),
    "mixtral, window": _of("Mixtral", num_local_experts=4, sliding_window=37),
    "qwen2 moe": _of(
        "Qwen2Moe", num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24,
        shared_expert_intermediate_size=40, decoder_sparse_step=2,
    ),
    "qwen3 moe": _of(
        "Qwen3Moe", num_experts=8, num_experts_per_tok=4, moe_intermediate_size=24, norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "olmoe": _of("Olmoe", num_experts=6, head_dim=LEFT_OUT, num_experts_per_tok=3),
    "glm4 moe": _of(
        "Glm4Moe", n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_group=4,
        topk_group=2, use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.7,
    ),
    "gpt oss": _of(
        "GptOss", num_local_experts=5, sliding_window=37, swiglu_limit=1.0, rope_parameters=_YARN,
    ),
    "deepseek v2": _of("DeepseekV2", **_LATENT, q_lora_rank=None, first_k_dense_replace=1),
    "deepseek v2, groups": _of(
        "DeepseekV2", **_LATENT, q_lora_rank=24, topk_method="group_limited_greedy", n_group=4, topk_group=2,
        routed_scaling_factor=3.0, rope_parameters={**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    ),
    "deepseek v3": _of(
        "DeepseekV3", **_LATENT, q_lora_rank=24, first_k_dense_replace=1, n_group=2, topk_group=1,
        rope_parameters={**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "llama4": _of(
        "Llama4", num_local_experts=4, intermediate_size=40, intermediate_size_mlp=56,
        interleave_moe_layer_step=2, no_rope_layer_interval=2, floor_scale=8,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 1.0, "original_max_position_embeddings": 64,
        },
    ),
}  # fmt: skip
