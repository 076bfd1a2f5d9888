"""Tiny random encoder checkpoints in the Hugging Face layout, with WordPiece tokenizers written here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789.,?!-'"
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "fox", "dog", "cat", "runs", "sleeps", "over", "lazy", "what", "is", "sky", "blue", "red"]
VOCAB = 160
BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
ROBERTA = {**BERT, "max_position_embeddings": 66, "pad_token_id": 1, "type_vocab_size": 1}
DISTIL = {
    "vocab_size": VOCAB, "dim": 48, "n_layers": 3, "n_heads": 4, "hidden_dim": 80,
    "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("Bert", "Model", BERT),
    "bert, below a head": ("Bert", "ForMaskedLM", BERT),
    "bert, gelu_new": ("Bert", "Model", {**BERT, "hidden_act": "gelu_new"}),
    "bert, relu, wide norms": ("Bert", "Model", {**BERT, "hidden_act": "relu", "layer_norm_eps": 1e-3}),
    "bert, silu, one type": ("Bert", "Model", {**BERT, "hidden_act": "silu", "type_vocab_size": 1}),
    "roberta": ("Roberta", "Model", ROBERTA),
    "roberta, below a head": ("Roberta", "ForMaskedLM", ROBERTA),
    "xlm-roberta": ("XLMRoberta", "Model", {**ROBERTA, "layer_norm_eps": 1e-5}),
    "camembert": ("Camembert", "Model", ROBERTA),
    "distilbert": ("DistilBert", "Model", DISTIL),
    "distilbert, below a head": ("DistilBert", "ForMaskedLM", {**DISTIL, "activation": "relu"}),
}
CLASSIFIERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert, 1": ("Bert", "ForSequenceClassification", {**BERT, "num_labels": 1}),
    "bert, 3": ("Bert", "ForSequenceClassification", {**BERT, "num_labels": 3}),
    "roberta, 1": ("Roberta", "ForSequenceClassification", {**ROBERTA, "num_labels": 1}),
    "xlm-roberta, 2": ("XLMRoberta", "ForSequenceClassification", {**ROBERTA, "num_labels": 2}),
    "distilbert, 2": ("DistilBert", "ForSequenceClassification", {**DISTIL, "num_labels": 2}),
}


@dataclass(frozen=True)
class TinyEncoder:
    path: Path
    model: Any  # the same weights in transformers

    def hidden(self, ids: Sequence[int], kinds: Sequence[int] | None = None) -> np.ndarray:
        """[tokens, hidden]"""
        out = self._run(ids, kinds, output_hidden_states=True)
        return np.asarray(out.hidden_states[-1][0])

    def logits(self, ids: Sequence[int], kinds: Sequence[int] | None = None) -> np.ndarray:
        """[labels]"""
        return np.asarray(self._run(ids, kinds).logits[0])

    def _run(self, ids: Sequence[int], kinds: Sequence[int] | None, **more: Any) -> Any:
        given = {} if kinds is None else {"token_type_ids": torch.tensor([list(kinds)])}
        tensor = torch.tensor([list(ids)])
        with torch.inference_mode():
            return self.model(tensor, attention_mask=torch.ones_like(tensor), **given, **more)


def make_encoder(
    path: Path, case: str | tuple[str, str, dict[str, Any]] = "bert", *, seed: int = 0
) -> TinyEncoder:
    """Random weights large enough that every part of the model shows in the output."""
    family, kind, changes = (CASES | CLASSIFIERS)[case] if isinstance(case, str) else case
    config = getattr(transformers, f"{family}Config")(**changes)
    config._attn_implementation = "eager"
    torch.manual_seed(seed + len(str(case)))
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.7 if "embed" in name else 0.15)
            else:
                is_norm = "norm" in name.lower() and name.endswith("weight")
                weight.normal_(mean=1.0 if is_norm else 0.0, std=0.2)
    model.save_pretrained(path)
    return TinyEncoder(path, model)


def write_wordpiece(path: Path) -> Tokenizer:
    """[CLS] text [SEP], or [CLS] text [SEP] other [SEP] with types 0 and 1; lower case, as BERT's."""
    tokens = [*SPECIAL, *WORDS, *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    vocab = {token: number for number, token in enumerate(tokens)}
    assert len(vocab) <= VOCAB
    made = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    made.add_special_tokens(SPECIAL)
    path.mkdir(parents=True, exist_ok=True)
    made.save(str(path / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (path / "tokenizer_config.json").write_text(
        json.dumps({**names, "mask_token": "[MASK]", "tokenizer_class": "BertTokenizer"})
    )
    return made


def write_sentence_transformers(path: Path, mode: str, *, normalize: bool) -> None:
    """modules.json and 1_Pooling/config.json, as that library writes them."""
    steps = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] * normalize)]
    listed = [
        {"idx": at, "name": str(at), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for at, (folder, kind) in enumerate(steps)
    ]
    (path / "modules.json").write_text(json.dumps(listed))
    words = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    flags = {f"pooling_mode_{word}": word.startswith(mode) and "sqrt" not in word for word in words}
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **flags}))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyEncoder]:
    """The checkpoint of a case, with a tokenizer, made once."""
    made: dict[str, TinyEncoder] = {}

    def get(case: str) -> TinyEncoder:
        if case not in made:
            path = tmp_path_factory.mktemp("encoder")
            made[case] = make_encoder(path, case)
            write_wordpiece(path)
        return made[case]

    return get


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tiny: Callable[[str], TinyEncoder]) -> TinyEncoder:
    """Every body in turn."""
    return tiny(request.param)


@pytest.fixture(params=CLASSIFIERS)
def classifier(request: pytest.FixtureRequest, tiny: Callable[[str], TinyEncoder]) -> TinyEncoder:
    """Every classifier in turn."""
    return tiny(request.param)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., TinyEncoder]:
    """make(case, modules=(mode, normalize)): a checkpoint of one's own."""

    def new(case: Any = "bert", modules: tuple[str, bool] | None = None) -> TinyEncoder:
        made = make_encoder(tmp_path / "own", case)
        write_wordpiece(made.path)
        if modules is not None:
            write_sentence_transformers(made.path, modules[0], normalize=modules[1])
        return made

    return new
