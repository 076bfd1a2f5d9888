"""GGUF files of tiny models, as llama.cpp's converter writes them, by the package `gguf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

KINDS = gguf.GGMLQuantizationType
ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = [*"abcdefghijklmnopqrstuvwxyz", *(f"t{number}" for number in range(26, 160))]


def name_of(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    parts = stem.split(".")
    if parts[1:2] == ["layers"]:
        return f"blk.{parts[2]}.{NAMES['.'.join(parts[3:])]}.{ending}"
    return f"{NAMES[stem]}.{ending}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """A query or key projection's rows as the converter puts Llama's."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """The other way round."""
    pairs = weight.reshape(heads, -1, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def random_blocks(kind: Any, rows: int, inputs: int, seed: int) -> np.ndarray:
    """A matrix in a type that the package does not write: any codes, with scales that make sensible
    numbers."""
    count, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (rows, inputs // count, size), dtype=np.uint8)
    scale = random.uniform(0.5, 1.0, size=(rows, inputs // count, 1)) * 3e-4
    for at in (208,) if kind == KINDS.Q6_K else (0, 2):
        data[..., at : at + 2] = (
            (scale / 8).astype(np.float16).view(np.uint8)
            if at == 208
            else (scale.astype(np.float16).view(np.uint8))
        )
    return data.reshape(rows, -1)


def write(
    path: Path,
    model: Any,
    kinds: Mapping[str, str],
    *,
    values: Mapping[str, Any] | None = None,
    tokens: Sequence[str] = TOKENS,
    parts: int = 0,
    factors: Sequence[float] = (),
) -> None:
    """The weights of a transformers model, each matrix in the type that `kinds` has for its name ("": all
    others); the model then has the numbers that were written. `parts`: tensors of one file, if in several.
    factors: of the rotary embedding's frequencies."""
    config = model.config
    kind_of = ARCHITECTURES[config.architectures[0]]
    writer = gguf.GGUFWriter(path, kind_of, split_max_tensors=parts)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(tokens))
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges([])
    writer.add_eos_token_id(config.eos_token_id)
    for name, value in (values or {}).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    for number, (name, weight) in enumerate(model.named_parameters()):
        plain = weight.detach().float().numpy()
        heads = 0
        if kind_of == "llama" and ".q_proj." in name:
            heads = config.num_attention_heads
        elif kind_of == "llama" and ".k_proj." in name:
            heads = config.num_key_value_heads
        if heads:
            plain = interleaved(plain, heads)
        found = next((kind for part, kind in kinds.items() if part and part in name), kinds.get("", "F32"))
        if plain.ndim == 1:
            found = "F32"
        kind = KINDS[found]
        if found in ("Q4_K", "Q5_K", "Q6_K"):
            data = random_blocks(kind, *plain.shape, seed=number)
        else:
            data = gguf.quants.quantize(plain, kind)
        writer.add_tensor(name_of(name), data, raw_dtype=kind)
        numbers = gguf.quants.dequantize(data, kind)
        back = apart(numbers, heads) if heads else numbers
        weight.data.copy_(torch.from_numpy(np.array(back)))
    if len(factors):
        writer.add_tensor("rope_freqs.weight", np.array(factors, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
