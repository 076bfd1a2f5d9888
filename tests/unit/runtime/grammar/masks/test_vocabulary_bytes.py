"""The bytes of ids agree with what the tokenizer library decodes; other kinds of files are refused."""

from __future__ import annotations

import copy
import json

import pytest

from runtime.grammar.masks.vocabulary_bytes import vocabulary_from_file, vocabulary_from_tokenizer
from runtime.protocol.errors import ModelLoadError

TEXTS = [
    "The quick brown fox.",
    "café naïve 日本語 😊 ☃ \u0000\x7f",
    " two  spaces\n\tand\r\ntabs ",
    '{"name": "Ünï", "x": [1, 2]}',
    "don't ᚠ",
]


def spelled(trained, ids):
    return b"".join(trained.vocabulary.tokens[number] for number in ids)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_spell_the_text(tokenizer, text):
    ids = tokenizer.encode(text)
    expected = text.encode()
    if tokenizer.name == "sentencepiece":
        expected = b" " + expected  # the normalizer prepends a space
    assert spelled(tokenizer, ids) == expected
    assert tokenizer.vocabulary.special.isdisjoint(ids)


def test_specials_and_padding(tokenizer):
    vocabulary = tokenizer.vocabulary
    added = {entry["content"]: entry["id"] for entry in tokenizer.data["added_tokens"]}
    assert len(vocabulary) == max(tokenizer.data["model"]["vocab"].values()) + 1 + 5
    assert set(range(len(vocabulary) - 5, len(vocabulary))) <= vocabulary.special
    for content, number in added.items():
        if content == "<think>":
            assert vocabulary.tokens[number] == b"<think>"
            assert number not in vocabulary.special
        else:
            assert vocabulary.tokens[number] == b""
            assert number in vocabulary.special
    assert len(vocabulary.eos) == 1
    assert all(vocabulary.tokens[number] for number in set(range(len(vocabulary))) - vocabulary.special)
    assert {token for token in vocabulary.tokens if len(token) == 1} >= {
        bytes([value]) for value in range(256)
    }


def test_unigram_with_metaspace():
    data = {
        "model": {
            "type": "Unigram",
            "unk_id": 0,
            "byte_fallback": True,
            "vocab": [["<unk>", 0.0], ["▁the", -1.0], ["<0xE6>", -9.0], ["é", -2.0], ["▁▁", -3.0]],
        },
        "decoder": {"type": "Metaspace", "replacement": "▁"},
    }
    vocabulary = vocabulary_from_tokenizer(data, vocab_size=5, eos=[])
    assert vocabulary.tokens == (b"", b" the", b"\xe6", "é".encode(), b"  ")
    assert vocabulary.special == {0}


def test_bytes_pieces_are_text_without_fallback():
    data = {
        "model": {"type": "BPE", "vocab": {"<0x41>": 0, "▁a": 1}, "merges": []},
        "pre_tokenizer": {"type": "Metaspace"},
    }
    assert vocabulary_from_tokenizer(data, vocab_size=2, eos=[]).tokens == (b"<0x41>", b" a")


def test_vocabulary_larger_than_the_model(tokenizer):
    size = len(tokenizer.vocabulary)
    with pytest.raises(ModelLoadError) as caught:
        vocabulary_from_tokenizer(tokenizer.data, vocab_size=size - 6, eos=[])
    assert str(size - 5) in str(caught.value)
    assert str(size - 6) in str(caught.value)


@pytest.mark.parametrize(
    "change", ["wordpiece", "wordlevel", "no model", "no decoder", "bad vocab", "bad added", "eos outside"]
)
def test_what_is_not_known_is_refused(trained, change):
    data = copy.deepcopy(trained("gpt2").data)
    eos = [0]
    match change:
        case "wordpiece":
            data["model"] = {"type": "WordPiece", "vocab": {"a": 0}}
        case "wordlevel":
            data["model"]["type"] = "WordLevel"
        case "no model":
            del data["model"]
        case "no decoder":
            data["decoder"] = data["pre_tokenizer"] = None
        case "bad vocab":
            data["model"]["vocab"] = None
        case "bad added":
            data["added_tokens"].append({"content": "x"})
        case "eos outside":
            eos = [10_000]
    with pytest.raises(ModelLoadError) as caught:
        vocabulary_from_tokenizer(data, vocab_size=1000, eos=eos)
    assert "tokenizer.json" in str(caught.value)


def test_from_file(trained, tmp_path):
    one = trained("gpt2")
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(one.data), encoding="utf-8")
    read = vocabulary_from_file(path, vocab_size=len(one.vocabulary), eos=one.vocabulary.eos)
    assert (read.tokens, read.special, read.eos) == (
        one.vocabulary.tokens,
        one.vocabulary.special,
        one.vocabulary.eos,
    )
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ModelLoadError, match="JSON object"):
        vocabulary_from_file(path, vocab_size=9, eos=[])
    with pytest.raises(ModelLoadError, match="cannot be read"):
        vocabulary_from_file(tmp_path / "none.json", vocab_size=9, eos=[])
