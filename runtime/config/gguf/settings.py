"""A GGUF file's values as a config.json."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from runtime.config.fields import Fields
from runtime.config.gguf.header import Header

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""general.architecture -> the architecture in config.json. Mistral's models are `llama` there."""
LLAMA3_POSITIONS, LLAMA3_LOW, LLAMA3_HIGH = 8192, 1.0, 4.0
"""The same for all models with Llama 3.1's rotary scaling; only the factor differs."""
_ENDS = ("eos", "eot", "eom")


def settings(header: Header, factors: Sequence[float]) -> dict[str, Any]:
    """factors: the contents of the tensor rope_freqs.weight; empty if there is none. Raises
    ModelLoadError."""
    fields = header.fields
    name = fields.text("general.architecture")
    if name not in ARCHITECTURES:
        raise fields.fail(
            f"GGUF files of the architecture {name!r} are not supported; known: {', '.join(ARCHITECTURES)}",
            "take the model's checkpoint in safetensors",
        )
    if fields.integer(f"{name}.expert_count", 0, minimum=0):
        raise fields.fail("GGUF files of mixtures of experts are not supported")
    heads = fields.integer(f"{name}.attention.head_count")
    hidden = fields.integer(f"{name}.embedding_length")
    head_dim = fields.integer(f"{name}.attention.key_length", hidden // heads)
    if fields.integer(f"{name}.rope.dimension_count", head_dim) != head_dim:
        raise fields.fail("a partial rotary embedding is not supported")
    positions = fields.integer(f"{name}.context_length")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise fields.fail(
            "has no embedding (token_embd.weight)",
            "if the model is split into several files, pass the first one",
        )
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": fields.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": fields.integer(f"{name}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": fields.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": positions,
        "rope_theta": fields.number(f"{name}.rope.freq_base", 10000.0),
        "rope_scaling": _scaling(fields, name, factors),
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "torch_dtype": "float16",
        "quantization_config": {"quant_method": "gguf"},
    }
    ends = [
        fields.integer(f"tokenizer.ggml.{end}_token_id", minimum=0)
        for end in _ENDS
        if fields.has(f"tokenizer.ggml.{end}_token_id")
    ]
    config["eos_token_id"] = list(dict.fromkeys(ends))
    if fields.has("tokenizer.ggml.bos_token_id"):
        config["bos_token_id"] = fields.integer("tokenizer.ggml.bos_token_id", minimum=0)
    if fields.has("general.name"):
        config["_name_or_path"] = fields.text("general.name")
    return config


def _scaling(fields: Fields, name: str, factors: Sequence[float]) -> dict[str, Any] | None:
    if factors:
        return _llama3(fields, factors, fields.number(f"{name}.rope.freq_base", 10000.0))
    kind = fields.text(f"{name}.rope.scaling.type", "none")
    match kind:
        case "none":
            return None
        case "linear":
            return {"rope_type": "linear", "factor": fields.number(f"{name}.rope.scaling.factor")}
        case "yarn":
            original = f"{name}.rope.scaling.original_context_length"
            return {
                "rope_type": "yarn",
                "factor": fields.number(f"{name}.rope.scaling.factor"),
                "original_max_position_embeddings": fields.integer(original),
            }
        case _:
            raise fields.fail(f"the rotary scaling {kind!r} is not supported; known: linear, yarn")


def _llama3(fields: Fields, factors: Sequence[float], theta: float) -> dict[str, Any]:
    """Converters store Llama 3.1's scaling as the divisor of each frequency: 1 for those kept, the factor for
    those stretched."""
    factor = float(max(factors))
    for index, divisor in enumerate(factors):
        turns = LLAMA3_POSITIONS * theta ** (-index / len(factors)) / (2 * math.pi)
        keep = min(1.0, max(0.0, (turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)))
        if not math.isclose(divisor, 1 / ((1 - keep) / factor + keep), rel_tol=1e-3):
            raise fields.fail("'rope_freqs.weight' is not a known kind of scaling")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": LLAMA3_POSITIONS,
    }
