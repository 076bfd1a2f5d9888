"""ModelSpec: the shape of a checkpoint, read from its config.json. Torch-free; never guesses silently.

It knows the Hugging Face directory layout; not weights, not tokenizers, nor how anything is computed.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path

from runtime.config.family import ACTIVATIONS, ARCHITECTURES, Family, Traits
from runtime.config.fields import Fields
from runtime.config.parts.quantization import Quantization, read_quantization
from runtime.config.parts.vision import VisionSpec
from runtime.protocol.errors import ModelLoadError

DTYPES = ("float32", "bfloat16", "float16")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_OF_THE_WHOLE = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
"""Fields outside the decoder's part of the configuration that apply to it."""
_OLD_KINDS = {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base `theta` and one kind of scaling. Every number is resolved; none is left to a
    default.

    "linear"    positions divided by `factor`
    "dynamic"   NTK scaling beyond the trained length; up to that length, at which this runtime stops
                (ModelSpec.max_position_embeddings), it equals the default kind
    "llama3"    Llama 3.1's: low frequencies divided by `factor`, with a smooth transition between two
                wavelengths
    "yarn"      YaRN (arXiv 2309.00071): a ramp between interpolation and extrapolation; cos and sin times
                `attention_factor`
    "longrope"  LongRoPE (arXiv 2402.13753): each frequency divided by its own of `factors`, or of
                `long_factors` in contexts beyond the trained length; cos and sin times `attention_factor`

    dims: how many of a head's dimensions are rotated, the first ones; 0 = all. pairs: which of them rotate
    together: halves: i and i + dims / 2; neighbours: 2 i and 2 i + 1. sections: how many of the pairs, in
    order, rotate with a position's time, row and column (arXiv 2409.12191); () = a position is one number.
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
    dims: int = 0
    pairs: str = "halves"
    factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    sections: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Traits):
    """The shape of a decoder.

    rope: of layers with full attention; layer_ropes: per layer if they differ (None = no rotary embedding),
    () = all have `rope`.
    activation: of the feed-forward, a value of ACTIVATIONS.
    experts: the layers whose feed-forwards are mixtures of experts, and how; `ffn_size` is for the other
    layers.
    max_position_embeddings: the most tokens of one context; with for_context() up to long_positions, if not
    0.
    eos_ids: ids that end a generation, from config.json and generation_config.json.
    dtype: the dtype of the weights according to the checkpoint: float32, bfloat16 or float16.
    quantization: how its matrices are stored; None: as `dtype`.
    vision: the vision tower for images; None: text only.
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
    tie_embeddings: bool
    max_position_embeddings: int
    eos_ids: tuple[int, ...]
    bos_id: int | None
    dtype: str
    quantization: Quantization | None = None
    layer_ropes: tuple[RopeSpec | None, ...] = ()
    activation: str = "silu"
    long_positions: int = 0
    vision: VisionSpec | None = None

    def for_context(self, length: int | None) -> ModelSpec:
        """The shape for contexts of up to `length` tokens. A LongRoPE model has other frequencies in long
        contexts, from the first token on; the two cannot be mixed, because keys are cached."""
        if length is None or not self.max_position_embeddings < length <= self.long_positions:
            return self
        rope = replace(self.rope, factors=self.rope.long_factors)
        return replace(self, rope=rope, max_position_embeddings=self.long_positions)

    @property
    def ropes(self) -> tuple[RopeSpec | None, ...]:
        """One per layer."""
        return self.layer_ropes or (self.rope,) * self.num_layers

    def unlike(self, other: ModelSpec) -> list[str]:
        """The fields by which another checkpoint's weights would not fit this model."""
        ignored = ("eos_ids", "bos_id", "dtype")  # they do not affect the weights' shapes
        names = (one.name for one in fields_of(self) if one.name not in ignored)
        return [name for name in names if getattr(self, name) != getattr(other, name)]

    @property
    def matrix_sizes(self) -> tuple[int, int]:
        """The numbers of elements in the layers' matrices, and in the embeddings' (norms and biases are
        negligible)."""
        attention = self.hidden_size * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        if (latent := self.latent) is not None:
            queries, up = self.num_heads * latent.query, self.num_heads * (latent.plain + latent.value)
            first, rank = latent.query_rank or queries, latent.query_rank or 0
            attention = self.hidden_size * (first + latent.kept + self.num_heads * latent.value)
            attention += rank * queries + latent.rank * up
        widths = self.num_layers * self.ffn_size
        if self.experts is not None:
            each = self.experts.count * self.experts.width + self.experts.shared_width
            widths += self.experts.layer_count * (each - self.ffn_size)
        matrices = 3 if self.gated else 2
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return self.num_layers * attention + matrices * self.hidden_size * widths, embeddings

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelSpec:
        """Read `path`/config.json (and generation_config.json, if it exists).

        Raises ModelLoadError if there is no such directory or no config.json, for invalid JSON, an unknown
        architecture, a field that is missing, of the wrong type or out of range, or a feature that this
        runtime does not support.
        """
        directory = Path(os.path.expanduser(path))
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
        return _spec(fields, extra, directory)


def _spec(fields: Fields, generation: Fields, directory: Path) -> ModelSpec:
    architecture, family = _family(fields)
    vision = None if family.vision is None else family.vision(fields).prepared(directory)
    outer, fields = fields, _decoder_fields(fields, family)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers, vocab = fields.integer("num_hidden_layers"), fields.integer("vocab_size")
    kv_heads = fields.integer("num_key_value_heads", heads if family.kv_heads_default else None)
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
    traits = replace(traits, windows=traits.windows or (None,) * layers)
    ropes = _Ropes(fields, family, head_dim, positions)
    rope, layer_ropes = ropes.of_layers(layers)
    if (latent := traits.latent) is not None:
        kv_heads, head_dim, rope = 1, latent.kept, replace(rope, dims=latent.turned)
    reach = rope.original_positions if rope.kind == "longrope" else positions
    ends = [_special(source, vocab, "eos_token_id") for source in (fields, outer, generation)]
    bos = _special(fields, vocab, "bos_token_id")
    return ModelSpec(
        **{field.name: getattr(traits, field.name) for field in fields_of(Traits)},
        architecture=architecture,
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size", family.ffn_default * hidden or None),
        norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        layer_ropes=layer_ropes,
        activation=activation_of(fields),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=min(reach, traits.longest or reach),
        long_positions=positions if rope.kind == "longrope" else 0,
        eos_ids=tuple(dict.fromkeys(itertools.chain(*ends))),
        bos_id=bos[0] if bos else None,
        dtype=dtype_of(fields),
        quantization=read_quantization(fields),
        vision=_fitting(vision, outer, hidden, vocab, rope),
    )


def _fitting(
    vision: VisionSpec | None, fields: Fields, hidden: int, vocab: int, rope: RopeSpec
) -> VisionSpec | None:
    if vision is None:
        return None
    if vision.out_size != hidden:
        raise fields.fail(
            f"the vision tower's output size is {vision.out_size}, the decoder's hidden size {hidden}"
        )
    if vision.image_id >= vocab:
        raise fields.fail(f"'image_token_id' {vision.image_id} is beyond the vocabulary of {vocab}")
    if len(rope.sections) != 3:
        raise fields.fail("'mrope_section' must have three numbers")
    return vision


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


def _decoder_fields(fields: Fields, family: Family) -> Fields:
    """The fields of the decoder's part, with missing ones filled in."""
    values, source = fields.values, fields.source
    if family.text:
        part = fields.child(family.text)
        if not part.values and family.flat:
            part = fields
        if not part.values:
            raise fields.fail(f"the field {family.text!r} is missing")
        whole = {name: values[name] for name in _OF_THE_WHOLE if values.get(name) is not None}
        values, source = {**part.values, **whole}, part.source
    missing = {name: value for name, value in family.defaults.items() if values.get(name) is None}
    return Fields({**values, **missing}, source, family.renamed)


def activation_of(fields: Fields, default: str = "silu") -> str:
    """Our name of the activation. Raises ModelLoadError."""
    name = fields.text("hidden_act", default)
    if name not in ACTIVATIONS:
        raise fields.fail(
            f"{fields.name_of('hidden_act')!r} {name!r} is not supported; known: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def _special(fields: Fields, vocab: int, name: str) -> tuple[int, ...]:
    ids = fields.ids(name)
    outside = [token for token in ids if token >= vocab]
    if outside:
        raise fields.fail(f"{name!r} contains {outside}, beyond the vocabulary of {vocab}")
    return ids


def dtype_of(fields: Fields) -> str:
    """The dtype of the weights. Raises ModelLoadError."""
    # transformers 5 writes "dtype", earlier versions "torch_dtype".
    name = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.text(name, "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise fields.fail(f"{name!r} {dtype!r} is not supported; known: {', '.join(DTYPES)}")
    return dtype


@dataclass(frozen=True, slots=True)
class _Ropes:
    """Reads rotary embeddings in three layouts: rope_theta + rope_scaling, transformers 5's rope_parameters
    with everything in it, and rope_parameters for each kind of layer."""

    fields: Fields
    family: Family
    head_dim: int
    positions: int

    def of_layers(self, layers: int) -> tuple[RopeSpec, tuple[RopeSpec | None, ...]]:
        """ModelSpec's rope and layer_ropes."""
        read = self.family.rope.kinds
        kinds = ("",) * layers if read is None else read(self.fields, layers)
        by_kind = {kind: self.of_kind(kind) for kind in dict.fromkeys(kinds) if kind is not None}
        if len(set(kinds)) == 1 and by_kind:
            return next(iter(by_kind.values())), ()
        rope = by_kind.get("full_attention") or next(iter(by_kind.values()), None) or self.of_kind("")
        return rope, tuple(None if kind is None else by_kind[kind] for kind in kinds)

    def of_kind(self, kind: str) -> RopeSpec:
        fields, local = self.fields, self.family.rope.local
        name = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
        rope = fields.child(name)
        if any(isinstance(value, dict) for value in rope.values.values()):
            if not kind:
                raise rope.fail("different rotary embeddings per layer type are not supported")
            return self._read(rope.child(kind), None)
        if kind == "sliding_attention" and local is not None and name == "rope_scaling":
            return self._read(Fields({}, fields.source), fields.number(local[0], local[1], above=1.0))
        return self._read(rope, None)

    def _read(self, rope: Fields, theta: float | None) -> RopeSpec:
        """theta: the base, if it is not rope_theta of the configuration."""
        fields, family, positions = self.fields, self.family.rope, self.positions
        if theta is None:
            source = rope if rope.has("rope_theta") else fields
            theta = source.number("rope_theta", family.theta, above=1.0)
        dims = self._dims(rope)
        kind = rope.text("rope_type", rope.text("type", "default"))
        kind = _OLD_KINDS.get(kind, kind)
        if kind not in ROPE_KINDS:
            raise rope.fail(f"unknown rope type {kind!r}", f"known: {', '.join(ROPE_KINDS)}")
        original = fields.integer("original_max_position_embeddings", positions)
        original = rope.integer("original_max_position_embeddings", original)
        sections = rope.ids("mrope_section")
        if sections and 2 * sum(sections) != (dims or self.head_dim):
            raise rope.fail(
                f"'mrope_section' {list(sections)} does not divide {dims or self.head_dim} dimensions"
            )
        plain = RopeSpec(theta, kind, dims=dims, pairs=family.pairs, sections=sections)
        match kind:
            case "linear":
                return replace(plain, factor=rope.number("factor"))
            case "llama3":
                low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
                if high < low:
                    raise rope.fail(
                        f"'high_freq_factor' ({high:g}) must not be below 'low_freq_factor' ({low:g})"
                    )
                return replace(
                    plain,
                    factor=rope.number("factor"),
                    original_positions=original,
                    low_freq_factor=low,
                    high_freq_factor=high,
                )
            case "yarn":
                factor = rope.number("factor", positions / original)
                return replace(
                    plain,
                    factor=factor,
                    original_positions=original,
                    beta_fast=rope.number("beta_fast", 32.0),
                    beta_slow=rope.number("beta_slow", 1.0),
                    attention_factor=rope.number("attention_factor", _yarn_attention_factor(rope, factor)),
                    truncate=rope.flag("truncate", True),
                )
            case "longrope":
                return self._longrope(rope, replace(plain, original_positions=original))
            case _:
                return plain

    def _longrope(self, rope: Fields, plain: RopeSpec) -> RopeSpec:
        pairs, original = (plain.dims or self.head_dim) // 2, plain.original_positions
        factors, long_factors = rope.numbers("short_factor"), rope.numbers("long_factor")
        for name, values in (("short_factor", factors), ("long_factor", long_factors)):
            if len(values) != pairs:
                raise rope.fail(f"{name!r} has {len(values)} entries for {pairs} pairs of dimensions")
        # The model's paper and code use the ratio of the two lengths if no factor is given.
        factor = rope.number("factor", self.positions / original)
        scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return replace(
            plain,
            factor=factor,
            factors=factors,
            long_factors=long_factors,
            attention_factor=rope.number("attention_factor", scale),
        )

    def _dims(self, rope: Fields) -> int:
        """How many dimensions are rotated; 0 = all."""
        default = self.family.rope.partial
        holder = rope if rope.has("partial_rotary_factor") else self.fields
        part = holder.number("partial_rotary_factor", 1.0 if default is None else default)
        if part == 1.0:
            return 0
        dims = int(self.head_dim * part)
        if default is None:
            raise holder.fail("'partial_rotary_factor' other than 1 is not supported for this model")
        if not 0 < dims <= self.head_dim or dims % 2:
            raise holder.fail(
                f"'partial_rotary_factor' {part:g} rotates {dims} of {self.head_dim} dimensions; must be "
                "an even number"
            )
        return dims


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    mscale = rope.number("mscale", 0.0, above=-1.0)
    everywhere = rope.number("mscale_all_dim", 0.0, above=-1.0)
    if mscale and everywhere:
        return magnitude(mscale) / magnitude(everywhere)
    return magnitude(1.0)
