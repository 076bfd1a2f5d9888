"""Tiny tokenizers trained on generated text, small helpers for automata, and a clock that stands still."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from runtime.grammar.automata.dfa import DEAD, ByteDfa
from runtime.grammar.masks.vocabulary_bytes import vocabulary_from_tokenizer
from runtime.protocol.vocabulary import Vocabulary

WORDS = [
    *(
        "the",
        "quick",
        "brown",
        "fox",
        "jumps",
        "over",
        "lazy",
        "dogs",
        "Harry",
        "Potter",
        "name",
        "age",
        "house",
    ),
    *(
        "wand",
        "city",
        "population",
        "Paris",
        "Rome",
        "café",
        "naïve",
        "日本語",
        "東京",
        "😊",
        "true",
        "false",
    ),
    *("null", "don't", "I'll", "we've", "x1", "42", "2026", "3.14", "e.g.", "e-mail", "user@example.com"),
    *("answer", "final", "Yes", "No"),
]
CAPITALS_ALONE = r"\p{Lu}\p{L}*| ?(?!\p{Lu})\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s"
CONTRACTIONS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


def generated_texts() -> list[str]:
    pick = random.Random(7)
    texts = []
    for _ in range(400):
        words = [pick.choice(WORDS) for _ in range(12)]
        texts.append(" ".join(words) + pick.choice([".", "!\n", "?\n\n", "  \n", ","]))
        record = {
            pick.choice(WORDS): pick.choice([pick.choice(WORDS), pick.randrange(999), True, None])
            for _ in range(4)
        }
        texts.append(json.dumps(record, indent=pick.choice([None, None, 2]), ensure_ascii=False))
        texts.append(f"The {words[0]}'s {words[1]} is {words[2]}; it's {pick.randrange(9999)}.")
    return texts


class Trained(NamedTuple):
    name: str
    data: dict[str, Any]
    vocabulary: Vocabulary
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]


def _finish(name: str, data: dict[str, Any], eos: str) -> Trained:
    tokenizer = Tokenizer.from_str(json.dumps(data))
    size = tokenizer.get_vocab_size() + 5
    vocabulary = vocabulary_from_tokenizer(data, vocab_size=size, eos=[tokenizer.token_to_id(eos)])
    return Trained(
        name,
        data,
        vocabulary,
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
    )


def _byte_level(name: str, pattern: str | None) -> Trained:
    tokenizer = Tokenizer(models.BPE())
    cut = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, cut])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<|end|>", "<think>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(generated_texts(), trainer)
    data = json.loads(tokenizer.to_str())
    for added in data["added_tokens"]:
        added["special"] = added["content"] != "<think>"
    return _finish(name, data, "<|end|>")


def _sentencepiece() -> Trained:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    single = [f"<0x{value:02X}>" for value in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", "<s>", "</s>", *single],
        show_progress=False,
        limit_alphabet=80,
    )
    tokenizer.train_from_iterator(generated_texts(), trainer)
    data = json.loads(tokenizer.to_str())
    data["pre_tokenizer"] = None
    data["added_tokens"] = [added for added in data["added_tokens"] if added["content"] not in single]
    return _finish("sentencepiece", data, "</s>")


MAKERS: dict[str, Callable[[], Trained]] = {
    "gpt2": lambda: _byte_level("gpt2", None),
    "capitals": lambda: _byte_level("capitals", CAPITALS_ALONE),
    "contractions": lambda: _byte_level("contractions", CONTRACTIONS),
    "sentencepiece": _sentencepiece,
}


@pytest.fixture(autouse=True, scope="module")
def _searches_end_by_their_work() -> Iterator[None]:
    """Searches for completions are bounded by work and by processor time; what is found may not depend on
    how fast the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("runtime.grammar.completion.time", SimpleNamespace(thread_time=lambda: 0.0))
        yield


@pytest.fixture(scope="session")
def trained() -> Callable[[str], Trained]:
    """A tokenizer by name, trained once."""
    made: dict[str, Trained] = {}
    return lambda name: made.setdefault(name, made.get(name) or MAKERS[name]())


@pytest.fixture(params=sorted(MAKERS), scope="session")
def tokenizer(request: pytest.FixtureRequest, trained: Callable[[str], Trained]) -> Trained:
    return trained(request.param)


@pytest.fixture(scope="session")
def accepts() -> Callable[[ByteDfa, str], bool]:
    def check(dfa: ByteDfa, text: str) -> bool:
        state = dfa.walk(0, text.encode())
        return state != DEAD and dfa.accepts(state)

    return check
