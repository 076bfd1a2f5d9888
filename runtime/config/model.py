"""ModelSpec: the shape of a checkpoint, read from its config.json. Torch-free; never guesses silently.

It knows the Hugging Face directory layout; not weights, not tokenizers, not how anything is computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from runtime.config.family import ARCHITECTURES, Family
from runtime.config.fields import Fields
from runtime.config.parts.experts import ExpertsSpec
from runtime.config.parts.quantization import Quantization, read_quantization
from runtime.protocol.errors import ModelLoadError

DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base `theta` and one kind of scaling; every number is resolved, none is left to a
    default.

    linear   positions divided by `factor`
    dynamic  NTK scaling that sets in beyond the trained length; up to that length, which is where this
             runtime stops (ModelSpec.max_position_embeddings), it is the default kind
    llama3   Llama 3.1's: low frequencies divided by `factor`, a smooth step between the two wavelengths
    yarn     YaRN (arXiv 2309.00071): a ramp between interpolation and extrapolation; cos and sin times
             `attention_factor`
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder's shape.

    windows: per layer, how many tokens back attention sees (itself included), None = all.
    experts: which layers' feed-forwards are mixtures of experts, and how; `ffn_size` is the others'.
    eos_ids: ids that end a generation, from config.json and generation_config.json together.
    dtype: what the checkpoint says its weights are: float32, bfloat16 or float16.
    quantization: how its matrices are stored; None: as `dtype`.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    max_position_embeddings: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: str
    experts: ExpertsSpec | None = None
    quantization: Quantization | None = None

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelSpec:
        """Read `path`/config.json (and generation_config.json, if there).

        Raises ModelLoadError: no such directory, no config.json, invalid JSON, an architecture that is not in
        the table, a field that is missing, of the wrong type or out of range, or a feature this runtime does
        not compute.
        """
        directory = Path(path).expanduser()
        if not directory.exists():
            raise ModelLoadError(
                "no such directory", where=str(directory), hint="give a checkpoint's local directory"
            )
        if not directory.is_dir():
            raise ModelLoadError("is a file, not a checkpoint's directory", where=str(directory))
        config = directory / "config.json"
        if not config.is_file():
            raise ModelLoadError(
                "has no config.json",
                where=str(directory),
                hint="a checkpoint is a directory in Hugging Face layout",
            )
        fields = Fields.read(config)
        generation = directory / "generation_config.json"
        extra = Fields.read(generation) if generation.is_file() else Fields({}, str(generation))
        return _spec(fields, extra)


def _spec(fields: Fields, generation: Fields) -> ModelSpec:
    architecture, family = _family(fields)
    _refuse_unsupported(fields)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers, vocab = fields.integer("num_hidden_layers"), fields.integer("vocab_size")
    kv_heads = (
        fields.integer("num_key_value_heads", heads)
        if family.kv_heads_default
        else fields.integer("num_key_value_heads")
    )
    if heads % kv_heads:
        raise fields.fail(
            f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})"
        )
    if not fields.has("head_dim") and hidden % heads:
        raise fields.fail(
            f"without 'head_dim', hidden_size ({hidden}) must be a multiple of the {heads} heads"
        )
    head_dim = fields.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise fields.fail(f"'head_dim' must be even for a rotary embedding, got {head_dim}")
    positions = fields.integer("max_position_embeddings")
    traits = family.traits(fields, layers)
    eos = _special(fields, vocab, "eos_token_id") + _special(generation, vocab, "eos_token_id")
    bos = _special(fields, vocab, "bos_token_id")
    return ModelSpec(
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size"),
        norm_eps=fields.number("rms_norm_eps"),
        rope=_rope(fields, family, positions),
        windows=traits.windows,
        qkv_bias=traits.qkv_bias,
        output_bias=traits.output_bias,
        mlp_bias=traits.mlp_bias,
        qk_norm=traits.qk_norm,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=positions,
        eos_ids=tuple(dict.fromkeys(eos)),
        bos_id=bos[0] if bos else None,
        dtype=_dtype(fields),
        experts=traits.experts,
        quantization=read_quantization(fields),
    )


def _family(fields: Fields) -> tuple[str, Family]:
    names = fields.names("architectures")
    if not names:
        raise fields.fail(
            "the field 'architectures' is missing or empty", f"known: {', '.join(ARCHITECTURES)}"
        )
    name = names[0]
    if name not in ARCHITECTURES:
        raise fields.fail(f"unknown architecture {name!r}", f"known: {', '.join(ARCHITECTURES)}")
    return name, ARCHITECTURES.load(name)


def _refuse_unsupported(fields: Fields) -> None:
    """Features that would change the numbers and that the decoder does not compute."""
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.fail(f"'hidden_act' {activation!r} is not supported; known: silu")


def _special(fields: Fields, vocab: int, name: str) -> tuple[int, ...]:
    ids = fields.ids(name)
    outside = [token for token in ids if token >= vocab]
    if outside:
        raise fields.fail(f"{name!r} holds {outside}, beyond the vocabulary of {vocab}")
    return ids


def _dtype(fields: Fields) -> str:
    # transformers 5 writes "dtype", earlier ones "torch_dtype".
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.fail(f"{name!r} {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    return dtype


def _rope(fields: Fields, family: Family, positions: int) -> RopeSpec:
    """Both layouts: rope_theta + rope_scaling, and transformers 5's rope_parameters with everything
    inside."""
    name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope = fields.child(name)
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise rope.fail("a rotary embedding per kind of layer is not supported")
    source = rope if rope.has("rope_theta") else fields
    theta = source.number("rope_theta", *_given(family.rope_theta_default), above=1.0)
    for holder in (rope, fields):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            raise holder.fail("'partial_rotary_factor' other than 1 is not supported")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise rope.fail(f"unknown rope type {kind!r}", f"known: {', '.join(ROPE_KINDS)}")
    original = fields.integer("original_max_position_embeddings", positions)
    original = rope.integer("original_max_position_embeddings", original)
    match kind:
        case "linear":
            return RopeSpec(theta, kind, factor=rope.number("factor"))
        case "llama3":
            low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
            if high <= low:
                raise rope.fail(f"'high_freq_factor' ({high:g}) must be above 'low_freq_factor' ({low:g})")
            factor = rope.number("factor")
            return RopeSpec(theta, kind, factor, original, low_freq_factor=low, high_freq_factor=high)
        case "yarn":
            factor = rope.number("factor", positions / original)
            return RopeSpec(
                theta,
                kind,
                factor,
                original,
                beta_fast=rope.number("beta_fast", 32.0),
                beta_slow=rope.number("beta_slow", 1.0),
                attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
                truncate=rope.flag("truncate", True),
            )
        case _:
            return RopeSpec(theta, kind)


def _given(default: float | None) -> tuple[float, ...]:
    return () if default is None else (default,)


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale, everywhere = (
        rope.number("mscale", 0.0, above=-1.0),
        rope.number("mscale_all_dim", 0.0, above=-1.0),
    )
    if mscale and everywhere:
        return magnitude(mscale) / magnitude(everywhere)
    return magnitude(1.0)
