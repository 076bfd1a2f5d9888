"""Cases beside those in conftest.py: families whose layers differ from Llama's, each in small."""

from __future__ import annotations

from typing import Any

KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LEFT_OUT = object()
"""A field that the family does not know."""
OLD = {"head_dim": LEFT_OUT, "num_key_value_heads": LEFT_OUT}


def _kinds_of_rope(local: float, **full: Any) -> dict[str, Any]:
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0, **full},
    }


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {}),
    "gemma2": ("Gemma2", {"sliding_window": 37, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0}),
    "gemma2, nothing capped": (
        "Gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None, "layer_types": KINDS},
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 37,
            "layer_types": KINDS,
            "rope_parameters": _kinds_of_rope(100.0, rope_type="linear", factor=4.0),
        },
    ),
    "gemma3, beside a vision tower": ("Gemma3Vision", {"sliding_window": 37, "layer_types": KINDS}),
    "mistral3, beside a vision tower": ("Mistral3", {}),
    "phi": ("Phi", {}),
    "phi3": ("Phi3", {"sliding_window": 37}),
    "phi3, part of the head turned": (
        "Phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "phi3, longrope": (
        "Phi3",
        {"original_max_position_embeddings": 96, "rope_parameters": LONGROPE, "hidden_size": 64},
    ),
    "ernie 4.5": ("Ernie4_5", {"use_bias": True}),
    "seed-oss": ("SeedOss", {}),
    "starcoder2": ("Starcoder2", {"sliding_window": 37}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "olmo2": ("Olmo2", {}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 37,
            "layer_types": KINDS,
            "rope_parameters": _kinds_of_rope(
                10000.0, rope_type="yarn", factor=4.0, original_max_position_embeddings=64
            ),
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 1.5,
            "logits_scaling": 0.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.3,
        },
    ),
    "glm": ("Glm", {}),
    "glm4": ("Glm4", {}),
    "cohere": ("Cohere", {"logit_scale": 0.5}),
    "cohere, normalised heads": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", {"sliding_window": 37, "layer_types": KINDS, "hidden_size": 64}),
    "ministral": ("Ministral", {"sliding_window": 37, "layer_types": KINDS}),
    "ministral3": (
        "Ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            }
        },
    ),
    "gpt2": ("GPT2", {**OLD, "intermediate_size": LEFT_OUT}),
    "gpt_neox": ("GPTNeoX", {**OLD, "hidden_size": 64}),
    "gpt_neox, one after the other": ("GPTNeoX", {**OLD, "hidden_size": 64, "use_parallel_residual": False}),
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma3Vision": ("gemma3_text", {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "Mistral3": ("ministral3", {"vision_config": {**VISION, "model_type": "pixtral", "head_dim": 16}}),
}
"""Families with a vision tower beside the decoder: the decoder's model type, and what is in the
configuration besides."""
CLASSES = {
    "Gemma3Vision": "Gemma3ForConditionalGeneration",
    "Mistral3": "Mistral3ForConditionalGeneration",
    "GPT2": "GPT2LMHeadModel",
    "Gemma3": "Gemma3ForCausalLM",
}
CONFIGS = {"Gemma3Vision": "Gemma3Config", "Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}
