"""The configurations with which models with experts are published (the fields that say something about their
shape) are read as they are meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.config.model import ModelSpec
from runtime.config.shards import check_ranks
from runtime.engine.memory import weight_bytes

BASE = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "attention_dropout": 0.0,
}
YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
DEEPSEEK = {
    **BASE, "attention_bias": False, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "moe_layer_freq": 1, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "max_position_embeddings": 163840, "ep_size": 1,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Mixtral-8x7B-v0.1": {
        **BASE, "architectures": ["MixtralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "sliding_window": None, "vocab_size": 32000,
    },
    "Qwen3-30B-A3B": {
        **BASE, "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1,
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1e6,
        "sliding_window": None, "use_sliding_window": False, "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        **BASE, "architectures": ["GptOssForCausalLM"], "attention_bias": True, "experts_per_token": 4,
        "head_dim": 64, "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "num_local_experts": 32, "rms_norm_eps": 1e-5, "rope_theta": 150000,
        "sliding_window": 128,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "swiglu_limit": 7.0, "vocab_size": 201088, "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
            "quant_method": "mxfp4",
        },
    },
    "DeepSeek-V2-Lite": {
        **DEEPSEEK, "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1,
        "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy", "vocab_size": 102400,
    },
    "DeepSeek-V3": {
        **DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "num_nextn_predict_layers": 1, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
        "vocab_size": 129280, "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    },
    "GLM-4.5-Air": {
        **BASE, "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "first_k_dense_replace": 1,
        "head_dim": 128, "hidden_size": 4096, "intermediate_size": 10944, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
        "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552,
    },
    "Llama-4-Scout-17B-16E": {
        "architectures": ["Llama4ForConditionalGeneration"], "torch_dtype": "bfloat16", "text_config": {
            "attention_bias": False, "attention_chunk_size": 8192, "bos_token_id": 200000, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 5120, "interleave_moe_layer_step": 1,
            "intermediate_size": 8192, "intermediate_size_mlp": 16384, "max_position_embeddings": 262144,
            "no_rope_layers": [], "num_attention_heads": 40, "num_experts_per_tok": 1,
            "num_hidden_layers": 48, "num_key_value_heads": 8, "num_local_experts": 16, "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "use_qk_norm": True, "vocab_size": 202048,
        },
        "vision_config": {"hidden_size": 1408},
    },
}  # fmt: skip
# Key heads and their length as they are kept; layers with experts, experts, chosen of them; the context;
# billions of parameters, as the models' cards say; ranks that can share it.
MEANT = {
    "Mixtral-8x7B-v0.1": (8, 128, 32, 8, 2, 32768, 46.7, 8),
    "Qwen3-30B-A3B": (4, 128, 48, 128, 8, 40960, 30.5, 8),
    "gpt-oss-20b": (8, 64, 24, 32, 4, 131072, 20.9, 8),
    "DeepSeek-V2-Lite": (1, 576, 26, 64, 6, 163840, 15.7, 16),
    "DeepSeek-V3": (1, 576, 58, 256, 8, 163840, 671.0, 16),
    "GLM-4.5-Air": (8, 128, 45, 128, 8, 131072, 106.9, 8),
    "Llama-4-Scout-17B-16E": (8, 128, 48, 16, 1, 8192, 107.8, 8),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    spec = ModelSpec.from_dir(tmp_path)
    experts = spec.experts
    assert experts is not None
    size = weight_bytes(spec, torch.bfloat16) / 2e9
    assert size == pytest.approx(MEANT[name][-2], rel=0.01)
    assert MEANT[name][:6] == (
        spec.num_kv_heads, spec.head_dim, experts.layer_count, experts.count, experts.router.chosen,
        spec.max_position_embeddings,
    )  # fmt: skip
    check_ranks(spec, MEANT[name][-1])
