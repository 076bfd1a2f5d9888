"""Tokenizers of the known kinds, trained on a few lines."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. Well, the dog sleeps; the fox runs on and on.",
    'She said: "yes, no, maybe" - and 3 + 4 = 7. {"name": "fox", "age": 3}',
    "서울은 대한민국의 수도이다. 안녕하세요, 반갑습니다. 감사합니다.",
    "🦊 🐕 👩‍👩‍👧 naïve café — ünï",
] * 4


def byte_level(vocab: int = 420) -> dict[str, Any]:
    """GPT-2's way: every byte a character."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    data: dict[str, Any] = json.loads(made.to_str())
    return data


def sentencepiece(metaspace: bool) -> dict[str, Any]:
    """Llama 2's way: ▁ for spaces, one put in front of the text, bytes as <0xE2> where there is no piece."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    if metaspace:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        made.decoder = decoders.Sequence(
            [decoders.Metaspace(prepend_scheme="first"), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    raw = [f"<0x{value:02X}>" for value in range(256)]
    control = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        limit_alphabet=60,
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in [*control, *raw]],
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    data: dict[str, Any] = json.loads(made.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in control]
    data["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "</s>", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
            "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]},
        },
    }
    return data


KINDS = {
    "byte level": byte_level(),
    "sentencepiece": sentencepiece(metaspace=False),
    "metaspace": sentencepiece(metaspace=True),
}


@pytest.fixture(scope="session")
def tokenizer_files() -> dict[str, dict[str, Any]]:
    return KINDS


@pytest.fixture(params=KINDS, scope="session")
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)
