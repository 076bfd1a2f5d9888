"""BERT (arXiv 1810.04805), RoBERTa (1907.11692) and DistilBERT (1910.01108). Data only.

MiniLM, BGE, E5 and GTE share BERT's layout, XLM-RoBERTa and CamemBERT RoBERTa's. RoBERTa counts positions
from the padding id and has its own kind of classifier; DistilBERT has no token types, and other names.
"""

from __future__ import annotations

from runtime.config.encoder import EncoderFamily, EncoderNames, Head

_PRETRAINING = (
    "cls.predictions.bias", "cls.predictions.decoder.weight", "cls.predictions.decoder.bias",
    "cls.predictions.transform.dense.weight", "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.LayerNorm.weight", "cls.predictions.transform.LayerNorm.bias",
    "cls.predictions.transform.LayerNorm.gamma", "cls.predictions.transform.LayerNorm.beta",
    "cls.seq_relationship.weight", "cls.seq_relationship.bias",
)  # fmt: skip
_BERT_BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")

BERT = EncoderFamily(
    prefix="bert.",
    names=EncoderNames(ignored=(*_BERT_BUFFERS, *_PRETRAINING, "pooler.dense.weight", "pooler.dense.bias")),
)
BERT_CLASSIFIER = EncoderFamily(
    prefix="bert.", names=EncoderNames(ignored=_BERT_BUFFERS), head=Head("pooler.dense", "classifier")
)


_HEAD_OF_MLM = (
    "lm_head.bias", "lm_head.decoder.weight", "lm_head.decoder.bias", "lm_head.dense.weight",
    "lm_head.dense.bias", "lm_head.layer_norm.weight", "lm_head.layer_norm.bias",
)  # fmt: skip
_POOLER = ("pooler.dense.weight", "pooler.dense.bias")

ROBERTA = EncoderFamily(
    prefix="roberta.",
    names=EncoderNames(ignored=(*_BERT_BUFFERS, *_HEAD_OF_MLM, *_POOLER)),
    counts_from_pad=True,
)
ROBERTA_CLASSIFIER = EncoderFamily(
    prefix="roberta.",
    names=EncoderNames(ignored=(*_BERT_BUFFERS, *_POOLER)),
    counts_from_pad=True,
    head=Head("classifier.dense", "classifier.out_proj"),
)


_DISTILBERT_LAYER = "transformer.layer.{layer}."
_DISTILBERT_MLM = (
    "vocab_transform.weight", "vocab_transform.bias", "vocab_layer_norm.weight", "vocab_layer_norm.bias",
    "vocab_projector.weight", "vocab_projector.bias",
)  # fmt: skip
_DISTILBERT_NAMES = EncoderNames(
    token_types=None,
    query=_DISTILBERT_LAYER + "attention.q_lin",
    key=_DISTILBERT_LAYER + "attention.k_lin",
    value=_DISTILBERT_LAYER + "attention.v_lin",
    output=_DISTILBERT_LAYER + "attention.out_lin",
    attention_norm=_DISTILBERT_LAYER + "sa_layer_norm",
    up=_DISTILBERT_LAYER + "ffn.lin1",
    down=_DISTILBERT_LAYER + "ffn.lin2",
    mlp_norm=_DISTILBERT_LAYER + "output_layer_norm",
    ignored=("embeddings.position_ids", *_DISTILBERT_MLM),
)


_DISTILBERT_FIELDS = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
}
DISTILBERT = EncoderFamily(prefix="distilbert.", renamed=_DISTILBERT_FIELDS, names=_DISTILBERT_NAMES)
DISTILBERT_CLASSIFIER = EncoderFamily(
    prefix="distilbert.",
    renamed=_DISTILBERT_FIELDS,
    names=_DISTILBERT_NAMES,
    head=Head("pre_classifier", "classifier", activation="relu"),
)
