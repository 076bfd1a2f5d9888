"""EncoderSpec: the shape of an encoder checkpoint (BERT and relatives), read from its config.json.
Torch-free.

It knows the Hugging Face directory layout and the table of known encoders; not weights, nor how anything is
computed. To add a family: one file under runtime/models/ with an EncoderFamily in it, and its lines here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from runtime.config.fields import Fields
from runtime.config.model import activation_of, dtype_of
from runtime.protocol.registry import Registry

_SCORE_ACTIVATIONS = {"Identity": "identity", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Names of a checkpoint's tensors, each with or without the family's prefix; `{layer}` is the layer's
    number. Each name stands for a `.weight` (and a `.bias`, except for embedding tables). token_types: None
    if there are none. `ignored`: suffixes of tensors that vectors do not need."""

    tokens: str = "embeddings.word_embeddings"
    positions: str = "embeddings.position_embeddings"
    token_types: str | None = "embeddings.token_type_embeddings"
    embedding_norm: str = "embeddings.LayerNorm"
    query: str = "encoder.layer.{layer}.attention.self.query"
    key: str = "encoder.layer.{layer}.attention.self.key"
    value: str = "encoder.layer.{layer}.attention.self.value"
    output: str = "encoder.layer.{layer}.attention.output.dense"
    attention_norm: str = "encoder.layer.{layer}.attention.output.LayerNorm"
    up: str = "encoder.layer.{layer}.intermediate.dense"
    down: str = "encoder.layer.{layer}.output.dense"
    mlp_norm: str = "encoder.layer.{layer}.output.LayerNorm"
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """A classifier over the first token's output: `dense`, an activation, `out`."""

    dense: str
    out: str
    activation: str = "tanh"


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """prefix: precedes the tensors' names if the checkpoint also has a head. renamed: the family's names of
    fields in config.json, by BERT's. counts_from_pad: the first token's position is the padding id + 1, and
    padding ids have the padding id as position, as in RoBERTa."""

    prefix: str
    renamed: Mapping[str, str] = field(default_factory=dict)
    names: EncoderNames = field(default_factory=EncoderNames)
    counts_from_pad: bool = False
    head: Head | None = None


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """The shape of an encoder.

    table_positions  rows of the position table; max_position_embeddings of them can be used
    token_types      number of segment kinds; below 2 none are passed
    labels           width of the classifier's output; 0: no classifier, the output is a vector
    score            the function applied to the classifier's output: identity or sigmoid
    dtype            the dtype of the weights according to the checkpoint
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    ffn_size: int
    norm_eps: float
    activation: str
    table_positions: int
    counts_from_pad: bool
    pad_id: int
    token_types: int
    labels: int
    score: str
    dtype: str
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def max_position_embeddings(self) -> int:
        """The most tokens of one text."""
        return self.table_positions - (self.pad_id + 1 if self.counts_from_pad else 0)

    @property
    def width(self) -> int:
        """Numbers in one output."""
        return self.labels or self.hidden_size


def encoder_spec(architecture: str, fields: Fields) -> EncoderSpec:
    """From config.json. Raises ModelLoadError."""
    family = ENCODERS.load(architecture)
    _refuse_unsupported(fields)
    fields = Fields(fields.values, fields.source, family.renamed)
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % heads:
        raise fields.fail(f"the hidden size ({hidden}) must be a multiple of the {heads} heads")
    pad = fields.integer("pad_token_id", 1 if family.counts_from_pad else 0, minimum=0)
    positions = fields.integer("max_position_embeddings")
    if family.counts_from_pad and positions <= pad + 1:
        raise fields.fail(f"'max_position_embeddings' must be above {pad + 1}, got {positions}")
    labels = 0
    if family.head is not None:  # two if config.json does not have the number
        labels = len(fields.child("id2label").values) or fields.integer("num_labels", 2)
    return EncoderSpec(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        num_layers=fields.integer("num_hidden_layers"),
        num_heads=heads,
        ffn_size=fields.integer("intermediate_size"),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        activation=activation_of(fields, "gelu"),
        table_positions=positions,
        counts_from_pad=family.counts_from_pad,
        pad_id=pad,
        token_types=fields.integer("type_vocab_size", 2, minimum=0) if family.names.token_types else 0,
        labels=labels,
        score=_score(fields, labels),
        dtype=dtype_of(fields),
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.has("quantization_config"):
        raise fields.fail(
            "quantised checkpoints are not supported", "use one with float32, bfloat16 or float16 weights"
        )
    kind = fields.text("position_embedding_type", "absolute")
    if kind != "absolute":
        raise fields.fail(f"'position_embedding_type' {kind!r} is not supported; known: absolute")
    for name in ("is_decoder", "add_cross_attention"):
        if fields.flag(name, False):
            raise fields.fail(f"{name!r} is not supported: the model is run as an encoder")


def _score(fields: Fields, labels: int) -> str:
    """The function that sentence-transformers applies to a cross-encoder's output: the checkpoint's own if
    given, else sigmoid for one label and identity for several."""
    name = fields.child("sentence_transformers").text("activation_fn", "")
    name = name or fields.text("sbert_ce_default_activation_function", "")
    if not name:
        return "sigmoid" if labels == 1 else "identity"
    activation = _SCORE_ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None:
        raise fields.fail(
            f"the score's activation {name!r} is not supported; known: {', '.join(_SCORE_ACTIVATIONS)}"
        )
    return activation


_BERT = "runtime.models.families.bert"
ENCODERS: Registry[EncoderFamily] = Registry(
    "encoder",
    {
        "BertModel": f"{_BERT}:BERT",
        "BertForMaskedLM": f"{_BERT}:BERT",
        "BertForPreTraining": f"{_BERT}:BERT",
        "BertForSequenceClassification": f"{_BERT}:BERT_CLASSIFIER",
        "RobertaModel": f"{_BERT}:ROBERTA",
        "RobertaForMaskedLM": f"{_BERT}:ROBERTA",
        "RobertaForSequenceClassification": f"{_BERT}:ROBERTA_CLASSIFIER",
        "XLMRobertaModel": f"{_BERT}:ROBERTA",
        "XLMRobertaForMaskedLM": f"{_BERT}:ROBERTA",
        "XLMRobertaForSequenceClassification": f"{_BERT}:ROBERTA_CLASSIFIER",
        "CamembertModel": f"{_BERT}:ROBERTA",
        "CamembertForMaskedLM": f"{_BERT}:ROBERTA",
        "DistilBertModel": f"{_BERT}:DISTILBERT",
        "DistilBertForMaskedLM": f"{_BERT}:DISTILBERT",
        "DistilBertForSequenceClassification": f"{_BERT}:DISTILBERT_CLASSIFIER",
    },
)
