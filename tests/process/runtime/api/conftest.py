"""A tiny random Llama and a tokenizer trained on a few lines: a checkpoint on disk, and an engine on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from runtime.api import Engine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "The quick brown fox jumps over the lazy dog. Well, the dog sleeps; the fox runs on.",
    'She said: "yes, no, maybe" - and 3 + 4 = 7. {"name": "fox", "age": 3}',
    "서울은 대한민국의 수도이다. 안녕하세요 🦊 🐕",
] * 3
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_tokenizer(folder: Path, vocab: int, **config: Any) -> None:
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
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", **config
    )
    fast.save_pretrained(folder)


def write_model(folder: Path, seed: int = 0, vocab: int = 384) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Larger than usual, so that the logits differ clearly and greedy choices do not hang on rounding.
        initializer_range=0.25,
        bos_token_id=None,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder)
    write_tokenizer(folder, 380, chat_template=CHATML)
    return folder


@pytest.fixture(scope="session")
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine(
        str(checkpoint), dtype="float32", device="cpu", max_total_tokens=4096, max_top_logprobs=1 << 20
    ) as made:
        yield made


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> PreTrainedModel:
    return LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
