"""process/server/test_embeddings.py, at length."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel

from runtime.api import Engine
from tests.process.patience import PATIENCE_S
from tests.process.server.test_embeddings import TEXTS


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A tiny random BERT with a tokenizer of a few words."""
    folder = tmp_path / "bert"
    torch.manual_seed(5)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sorted({word for text in TEXTS for word in text.split()})]
    config = BertConfig(
        vocab_size=len(words), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=32, initializer_range=0.3,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    made = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    made.save(str(folder / "tokenizer.json"))
    return folder


def test_an_encoder_behind_two_front_doors(start_server: Callable[..., Any], bert: Path) -> None:
    server = start_server("--model", str(bert), "--http-workers", "2", "--dtype", "float32").wait_ready()
    with Engine(str(bert), dtype="float32", device="cpu", threads=1) as engine:
        wanted = [np.array(one.embedding) for one in engine.embed(TEXTS)]

    def ask(number: int) -> None:
        at = number % len(TEXTS)
        body = {"model": "bert", "input": [TEXTS[at], TEXTS[0]]}
        answer = httpx.post(server.url + "/v1/embeddings", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        for one, vector in zip(answer.json()["data"], (wanted[at], wanted[0]), strict=True):
            np.testing.assert_allclose(one["embedding"], vector, atol=1e-5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(40)))
    assert httpx.get(server.url + "/health", timeout=PATIENCE_S).status_code == 200
    assert httpx.get(server.url + "/model_info", timeout=PATIENCE_S).json()["is_generation"] is False
    refused = httpx.post(server.url + "/generate", json={"text": "the fox"}, timeout=PATIENCE_S)
    assert refused.status_code == 400
    assert "computes vectors" in refused.text
    long = httpx.post(server.url + "/encode", json={"text": "fox " * 40}, timeout=PATIENCE_S)
    assert long.status_code == 400
    assert "32" in long.text
    assert server.end() == 0
