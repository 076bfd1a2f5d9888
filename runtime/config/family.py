"""Family: what one family of checkpoints does differently, as data; and the table of known architectures.

Torch-free, like every file the table points to. It does not know how weights are loaded or layers computed.
To add a model: one file under runtime/models/ with a Family in it, and one line here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from runtime.config.fields import Fields
from runtime.config.parts.experts import ExpertNames, ExpertsSpec
from runtime.protocol.registry import Registry


@dataclass(frozen=True, slots=True)
class Traits:
    """How a checkpoint's layers differ from the plain decoder.

    windows: one per layer; how many tokens back attention sees, itself included; None = all of them.
    experts: where feed-forwards are mixtures of experts.
    """

    windows: tuple[int | None, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a checkpoint's tensors; `{layer}` is the layer's number. Projections are given without their
    `.weight` or `.bias`. `ignored`: ends of names of tensors that hold nothing to load."""

    embedding: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    head: str = "lm_head"
    attention_norm: str = "model.layers.{layer}.input_layernorm.weight"
    mlp_norm: str = "model.layers.{layer}.post_attention_layernorm.weight"
    query: str = "model.layers.{layer}.self_attn.q_proj"
    key: str = "model.layers.{layer}.self_attn.k_proj"
    value: str = "model.layers.{layer}.self_attn.v_proj"
    output: str = "model.layers.{layer}.self_attn.o_proj"
    query_norm: str = "model.layers.{layer}.self_attn.q_norm.weight"
    key_norm: str = "model.layers.{layer}.self_attn.k_norm.weight"
    gate: str = "model.layers.{layer}.mlp.gate_proj"
    up: str = "model.layers.{layer}.mlp.up_proj"
    down: str = "model.layers.{layer}.mlp.down_proj"
    experts: ExpertNames = field(default_factory=ExpertNames)
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class Family:
    """traits: reads the family's own fields (configuration, number of layers).

    kv_heads_default: a missing num_key_value_heads means as many as num_attention_heads.
    rope_theta_default: the base of the rotary embedding where the format lets it be left out; None = it may
    not be.
    """

    traits: Callable[[Fields, int], Traits]
    names: Names = field(default_factory=Names)
    kv_heads_default: bool = False
    rope_theta_default: float | None = None


def full_attention(layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def layered_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Qwen's words: use_sliding_window, sliding_window and either layer_types or max_window_layers (layers
    from that one on are windowed)."""
    if not fields.flag("use_sliding_window", False):
        return full_attention(layers)
    window = fields.integer("sliding_window")
    kinds = fields.names("layer_types")
    if kinds:
        table = {"sliding_attention": window, "full_attention": None}
        unknown = sorted(set(kinds) - set(table))
        if unknown:
            raise fields.fail(f"'layer_types' holds {unknown}; known: {sorted(table)}")
        if len(kinds) != layers:
            raise fields.fail(f"'layer_types' has {len(kinds)} entries for {layers} layers")
        return tuple(table[kind] for kind in kinds)
    first = fields.integer("max_window_layers", minimum=0)
    return tuple(window if layer >= first else None for layer in range(layers))


ARCHITECTURES: Registry[Family] = Registry(
    "model",
    {
        "LlamaForCausalLM": "runtime.models.llama:FAMILY",
        "MistralForCausalLM": "runtime.models.mistral:FAMILY",
        "MixtralForCausalLM": "runtime.models.moe.mixtral:FAMILY",
        "Qwen2ForCausalLM": "runtime.models.qwen2:FAMILY",
        "Qwen3ForCausalLM": "runtime.models.qwen3:FAMILY",
        "Qwen2MoeForCausalLM": "runtime.models.moe.qwen2:FAMILY",
        "Qwen3MoeForCausalLM": "runtime.models.moe.qwen3:FAMILY",
    },
)
