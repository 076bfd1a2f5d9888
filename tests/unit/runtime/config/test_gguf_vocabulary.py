"""Vocabularies of GGUF files: as tokenizers they read and write texts like those they were made of."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2

from runtime.config.gguf.header import Header
from runtime.config.gguf.vocabulary import tokenizer
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.protocol.errors import ModelLoadError

WORDS = (
    "the there these other another weather we'll I'd it's It's 12 1234 345678 naïve straße café über 你好 "
    "世界 🙂 don't"
)
TRAINING = [" ".join(random.Random(n).choices(WORDS.split(), k=12)) for n in range(300)]
TEXTS = [
    "", " ", "  two  spaces   three", "the other weather", "It's 1234567 o'clock",
    "line\n\n next\r\n\tTAB", "naïve café", "nai\u0308ve cafe\u0301", "你好，世界！🙂🙂", "don't WE'LL don'T",
    "<s> is no mark<|end|>the", "\u00a0odd\u2003spaces ", "x" * 40, "a_b-c==d", "\u0e44\u0e17\u0e22",
]  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def _split(pattern: str) -> Any:
    cut = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _cutting(kind: str) -> Any:
    match kind:
        case "gpt-2":
            return pre_tokenizers.ByteLevel(add_prefix_space=False)
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        case _:
            return _split(QWEN2 if kind == "qwen2" else LLAMA3)


def byte_level(kind: str) -> Any:
    made = tokenizers.Tokenizer(models.BPE(ignore_merges=kind == "llama-bpe"))
    made.normalizer = normalizers.NFC() if kind == "qwen2" else None
    made.pre_tokenizer, made.decoder = _cutting(kind), decoders.ByteLevel()
    marks = [tokenizers.AddedToken("<|end|>", special=True, normalized=False)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=marks, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(TRAINING, trainer)
    return made


def sentence_piece() -> Any:
    made = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    marks = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=marks, limit_alphabet=40, show_progress=False
    )
    # SentencePiece joins no two words.
    made.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    made.train_from_iterator(TRAINING, trainer)
    made.pre_tokenizer = None
    data = json.loads(made.to_str())
    data["added_tokens"] = data["added_tokens"][:3]  # bytes are spelled, not read
    return tokenizers.Tokenizer.from_str(json.dumps(data))


def header(made: Any, model: str, **values: Any) -> Header:
    data = json.loads(made.to_str())
    vocab: dict[str, int] = data["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.__getitem__)
    marks = {token["content"] for token in data["added_tokens"]}
    kinds = [
        2 if token == "<unk>" else 3 if token in marks else 6 if token.startswith("<0x") else 1
        for token in tokens
    ]
    known = {"model": model, "tokens": tokens, "token_type": kinds, **values}
    if model == "gpt2":
        known["merges"] = [" ".join(pair) for pair in data["model"]["merges"]]
    else:
        known["scores"] = [-float(number) for number in range(len(tokens))]
    given = {f"tokenizer.ggml.{name}": value for name, value in known.items()}
    return Header(Path("model.gguf"), given, {})


def texts(seed: int) -> Sequence[str]:
    chance = random.Random(seed)
    letters = "aehinort '1234\n\u00e9\u4f60▁"
    made = ["".join(chance.choices(letters, k=chance.randrange(1, 30))) for _ in range(150)]
    return [*TEXTS, *made]


@pytest.mark.parametrize("kind", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_byte_level(kind: str) -> None:
    right = byte_level(kind)
    data, config = tokenizer(header(right, "gpt2", pre=kind, eos_token_id=0))
    found = tokenizers.Tokenizer.from_str(json.dumps(data))
    for text in texts(1):
        ids = right.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert found.decode(ids) == right.decode(ids)
    assert len(right.encode("the other weather")) < 8  # merges were learnt
    assert config["eos_token"] == "<|end|>"
    assert Tokenizer(data, config, 500).eos == {0}


@pytest.mark.parametrize("begins", [True, False])
def test_sentence_piece(begins: bool) -> None:
    right = sentence_piece()
    numbers = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, "add_bos_token": begins}
    data, config = tokenizer(header(right, "llama", **numbers))
    found = tokenizers.Tokenizer.from_str(json.dumps(data))
    for text in texts(2):
        ids = right.encode(text).ids
        assert found.encode(text, add_special_tokens=False).ids == ids, text
        assert found.decode(ids) == right.decode(ids)
    assert len(right.encode("the other weather")) < 8
    made = Tokenizer(data, config, 500)
    assert (made.bos, made.eos) == (1, {2})
    assert made.encode("the") == [*([1] if begins else []), *right.encode("the").ids]


def test_the_chat_template_comes_along() -> None:
    given = header(byte_level("gpt-2"), "gpt2", pre="gpt-2", bos_token_id=0)
    text = "{{ bos_token }}{{ messages[0].content }}"
    values = {**given.values, "tokenizer.chat_template": text}
    _, config = tokenizer(Header(given.path, values, {}))
    assert (config["chat_template"], config["bos_token"]) == (text, "<|end|>")


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"model": "bert"}, "the vocabulary 'bert' is not supported; known: gpt2, llama"),
        ({"pre": "tekken"}, "the pre-tokenizer 'tekken' is not supported; known: gpt-2, llama-bpe"),
        ({"token_type": [1]}, r"has \d+ tokens but 1 token types"),
        ({"model": "llama", "scores": [0.0]}, r"has \d+ tokens but 1 scores"),
    ],
)
def test_vocabularies_that_are_refused(values: dict[str, Any], told: str) -> None:
    given = header(byte_level("gpt-2"), "gpt2")
    changed = {f"tokenizer.ggml.{name}": value for name, value in values.items()}
    with pytest.raises(ModelLoadError, match=told):
        tokenizer(Header(given.path, {**given.values, **changed}, {}))
