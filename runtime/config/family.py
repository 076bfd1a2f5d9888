"""Family: how one family of checkpoints differs, as data; and the table of known architectures.

Torch-free, like every file that the table names. It does not know how weights are loaded or layers computed.
To add a model: a Family in a file under runtime/models/families, and one line here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from runtime.config.fields import Fields
from runtime.config.parts.experts import ExpertNames, ExpertsSpec
from runtime.config.parts.latent import LatentNames, LatentSpec
from runtime.config.parts.vision import VisionSpec
from runtime.protocol.registry import Registry

ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu",
    "silu": "silu", "swish": "silu", "tanh": "tanh",
}  # fmt: skip
"""Names in config.json -> our names of activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + beta * log(1 + floor((p + shift) / every)), so that
    attention stays sharp in long contexts (Llama 4, Ministral 3). turned: also in layers with a rotary
    embedding."""

    beta: float
    every: int
    shift: int = 0
    turned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """How a checkpoint's layers differ from the plain decoder, which is Llama's. Names tells where the norms
    are.

    windows            per layer, how many tokens back attention sees, itself included; None = all; () = no
                       layer has a window
    norm               rms; rms_plus_one: the weight is stored as its difference from 1; layer: LayerNorm
    norm_bias          the norms have biases too
    qk_norm            queries and keys are normalised before the rotary embedding
    qk_norm_scope       the scope of one such norm: head: each head, all with the same weight; each_head: each
                       head, with its own weight; heads: all query heads together, all key heads together
                       (OLMo 2); turned_head: each head without a weight, in layers with a rotary embedding
                       (Llama 4)
    gated              the feed-forward is down(activation(gate) * up), else down(activation(up))
    parallel           attention and feed-forward both start from the layer's input
    learned_positions  learned positions are added to the embedding; there is no rotary embedding
    attention_scale    factor of the scores; None = 1 / sqrt(head_dim)
    attention_softcap  softcap of the scores (arXiv 2408.00118); None = not capped
    sinks              each query head has one more score, whose value is zero (arXiv 2309.17453)
    query_growth       None = queries do not grow with their position
    embedding_scale, residual_scale, logit_scale
                       factors of the embedding, of each half layer's addition to the residual, and of the
                       logits
    logit_softcap      None = logits are not capped
    qkv_by_head        queries, keys and values are in one matrix, head by head (GPT-NeoX)
    experts            the layers whose feed-forwards are mixtures of experts
    latent             attention to latents; None = to keys and values. With latents there is one key head, as
                       long as the latent and the key beside it
    longest            the longest context that is computed exactly; None = max_position_embeddings
    further_layers     layers after the last one that predict further tokens; they are not loaded
    """

    windows: tuple[int | None, ...] = ()
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    norm: str = "rms"
    norm_bias: bool = False
    qk_norm: bool = False
    qk_norm_scope: str = "head"
    gated: bool = True
    parallel: bool = False
    learned_positions: bool = False
    attention_scale: float | None = None
    attention_softcap: float | None = None
    sinks: bool = False
    query_growth: QueryGrowth | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    qkv_by_head: bool = False
    experts: ExpertsSpec | None = None
    latent: LatentSpec | None = None
    longest: int | None = None
    further_layers: int = 0


@dataclass(frozen=True, slots=True)
class Names:
    """Names of a checkpoint's tensors; `{layer}` is the layer's number. Projections are given without their
    `.weight` or `.bias`. Norms: None = there is none; the two `_post_` norms apply to the values that are
    added to the residual. The same name for query, key and value, or for gate and up, means one tensor that
    holds them one after the other.

    prefix: precedes each name that the checkpoint does not have as it is.
    within: replaces `model.` in such names; "" = nothing does.
    further: prefix of the layers after the last one.
    transposed: suffixes of tensors that are stored as [inputs, outputs].
    ignored: suffixes of tensors with nothing to load.
    beside: prefixes of tensors that are not of the decoder, and are not loaded.
    """

    embedding: str = "model.embed_tokens.weight"
    positions: str = ""
    final_norm: str = "model.norm.weight"
    head: str = "lm_head"
    attention_norm: str | None = "model.layers.{layer}.input_layernorm.weight"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "model.layers.{layer}.post_attention_layernorm.weight"
    mlp_post_norm: str | None = None
    query: str = "model.layers.{layer}.self_attn.q_proj"
    key: str = "model.layers.{layer}.self_attn.k_proj"
    value: str = "model.layers.{layer}.self_attn.v_proj"
    output: str = "model.layers.{layer}.self_attn.o_proj"
    query_norm: str = "model.layers.{layer}.self_attn.q_norm.weight"
    key_norm: str = "model.layers.{layer}.self_attn.k_norm.weight"
    sinks: str = "model.layers.{layer}.self_attn.sinks"
    gate: str = "model.layers.{layer}.mlp.gate_proj"
    up: str = "model.layers.{layer}.mlp.up_proj"
    down: str = "model.layers.{layer}.mlp.down_proj"
    experts: ExpertNames = field(default_factory=ExpertNames)
    latent: LatentNames = field(default_factory=LatentNames)
    further: str = "model.layers.{layer}."
    prefix: str = ""
    within: str = ""
    transposed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ("rotary_emb.inv_freq",)
    beside: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rope:
    """How a family's configuration describes its rotary embedding.

    theta      the default base; None = the field is required
    partial    the default part of a head's dimensions that is rotated; None = always all
    pairs      the dimensions that rotate together: halves: i and i + dims / 2; neighbours: 2 i and 2 i + 1
    kinds      function of (configuration, number of layers): per layer the key of its embedding in
               `rope_parameters`, "" for the only one, None for a layer without; None = one for all layers
    local      (field, default) of the base for the kind "sliding_attention" in the layout without
               `rope_parameters`; scaling applies only to the other kinds then
    """

    theta: float | None = None
    partial: float | None = None
    pairs: str = "halves"
    kinds: Callable[[Fields, int], tuple[str | None, ...]] | None = None
    local: tuple[str, float | None] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """traits: reads the family's own fields (configuration, number of layers).
    renamed: the family's names of fields, by the usual name.
    kv_heads_default: a missing num_key_value_heads means num_attention_heads.
    defaults: values of missing or null fields, by the family's names.
    text: the field with the decoder's configuration, in checkpoints with other parts; "" = there are none.
    flat: in older checkpoints its fields are at the top level.
    vision: reads the vision tower's part of the whole configuration; None = images are not supported.
    ffn_default: a missing intermediate_size means this many times the hidden size; 0 = it is required."""

    traits: Callable[[Fields, int], Traits]
    names: Names = field(default_factory=Names)
    rope: Rope = field(default_factory=Rope)
    renamed: Mapping[str, str] = field(default_factory=dict)
    kv_heads_default: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    flat: bool = False
    ffn_default: int = 0
    vision: Callable[[Fields], VisionSpec] | None = None


def biases(fields: Fields, name: str = "attention_bias", *, default: bool = False) -> dict[str, Any]:
    """One field for the biases of the projections before and after attention."""
    bias = fields.flag(name, default)
    return {"qkv_bias": bias, "output_bias": bias}


def one_window(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """sliding_window, the same in every layer; null or missing: none."""
    return (fields.integer("sliding_window") if fields.has("sliding_window") else None,) * layers


def unturned_layers(fields: Fields, layers: int, *, exactly: bool = False) -> tuple[str | None, ...]:
    """Rope.kinds of a model in which some layers have no rotary embedding. In the field no_rope_layers, in
    spite of its name, 1 stands for a layer with one. exactly: further entries are refused."""
    turned = fields.ids("no_rope_layers")
    if not turned:
        every = fields.integer("no_rope_layer_interval", 4)
        turned = tuple(int((layer + 1) % every != 0) for layer in range(layers))
    if len(turned) < layers or (exactly and len(turned) > layers):
        raise fields.fail(f"'no_rope_layers' has {len(turned)} entries for {layers} layers")
    return tuple("" if one else None for one in turned[:layers])


LAYER_TYPES = ("sliding_attention", "full_attention")


def layer_types(fields: Fields, layers: int, every: int) -> tuple[str, ...]:
    """The field layer_types. If it is missing, every `every`-th layer has full attention, the others a
    window."""
    kinds = fields.names("layer_types")
    if not kinds:
        return tuple(LAYER_TYPES[(layer + 1) % every == 0] for layer in range(layers))
    unknown = sorted(set(kinds) - set(LAYER_TYPES))
    if unknown:
        raise fields.fail(f"'layer_types' contains {unknown}; known: {sorted(LAYER_TYPES)}")
    if len(kinds) != layers:
        raise fields.fail(f"'layer_types' has {len(kinds)} entries for {layers} layers")
    return kinds


def windows_of(kinds: tuple[str, ...], window: int | None) -> tuple[int | None, ...]:
    """`window` for the layers of the windowed kind."""
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layered_windows(fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Qwen's fields: use_sliding_window, sliding_window and either layer_types or max_window_layers (layers
    from that one on are windowed)."""
    if not fields.flag("use_sliding_window", False):
        return ()
    window = fields.integer("sliding_window")
    if fields.names("layer_types"):
        return windows_of(layer_types(fields, layers, layers), window)
    first = fields.integer("max_window_layers", minimum=0)
    return tuple(window if layer >= first else None for layer in range(layers))


ARCHITECTURES: Registry[Family] = Registry(
    "model",
    {
        "CohereForCausalLM": "runtime.models.families.dense:COHERE",
        "Cohere2ForCausalLM": "runtime.models.families.dense:COHERE2",
        "Ernie4_5ForCausalLM": "runtime.models.families.dense:ERNIE",
        "DeepseekV2ForCausalLM": "runtime.models.families.experts:DEEPSEEK_V2",
        "DeepseekV3ForCausalLM": "runtime.models.families.experts:DEEPSEEK_V3",
        "GPT2LMHeadModel": "runtime.models.families.dense:GPT2",
        "GPTNeoXForCausalLM": "runtime.models.families.dense:GPT_NEOX",
        "GemmaForCausalLM": "runtime.models.families.dense:GEMMA",
        "Gemma2ForCausalLM": "runtime.models.families.dense:GEMMA2",
        "Gemma3ForCausalLM": "runtime.models.families.dense:GEMMA3",
        "Gemma3ForConditionalGeneration": "runtime.models.families.dense:GEMMA3_TEXT",
        "GlmForCausalLM": "runtime.models.families.dense:GLM",
        "Glm4ForCausalLM": "runtime.models.families.dense:GLM4",
        "Glm4MoeForCausalLM": "runtime.models.families.experts:GLM4_MOE",
        "GptOssForCausalLM": "runtime.models.families.experts:GPT_OSS",
        "GraniteForCausalLM": "runtime.models.families.dense:GRANITE",
        "LlamaForCausalLM": "runtime.models.families.dense:LLAMA",
        "Llama4ForCausalLM": "runtime.models.families.experts:LLAMA4",
        "Llama4ForConditionalGeneration": "runtime.models.families.experts:LLAMA4_WITH_TOWER",
        "MinistralForCausalLM": "runtime.models.families.dense:MINISTRAL",
        "Ministral3ForCausalLM": "runtime.models.families.dense:MINISTRAL3",
        "MistralForCausalLM": "runtime.models.families.dense:MISTRAL",
        "Mistral3ForConditionalGeneration": "runtime.models.families.dense:MISTRAL3_TEXT",
        "MixtralForCausalLM": "runtime.models.families.experts:MIXTRAL",
        "Olmo2ForCausalLM": "runtime.models.families.dense:OLMO2",
        "Olmo3ForCausalLM": "runtime.models.families.dense:OLMO3",
        "OlmoeForCausalLM": "runtime.models.families.experts:OLMOE",
        "PhiForCausalLM": "runtime.models.families.dense:PHI",
        "Phi3ForCausalLM": "runtime.models.families.dense:PHI3",
        "Qwen2ForCausalLM": "runtime.models.families.dense:QWEN2",
        "Qwen2VLForConditionalGeneration": "runtime.models.families.dense:QWEN2_VL",
        "Qwen2_5_VLForConditionalGeneration": "runtime.models.families.dense:QWEN2_5_VL",
        "Qwen2MoeForCausalLM": "runtime.models.families.experts:QWEN2_MOE",
        "Qwen3ForCausalLM": "runtime.models.families.dense:QWEN3",
        "Qwen3MoeForCausalLM": "runtime.models.families.experts:QWEN3_MOE",
        "SeedOssForCausalLM": "runtime.models.families.dense:SEED_OSS",
        "SmolLM3ForCausalLM": "runtime.models.families.dense:SMOLLM3",
        "Starcoder2ForCausalLM": "runtime.models.families.dense:STARCODER2",
    },
)
