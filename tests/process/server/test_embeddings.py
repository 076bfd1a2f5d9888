"""Vectors from real servers: an encoder's, and a decoder's beside its generations."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from runtime.api import Engine
from tests.process.patience import PATIENCE_S

TEXTS = ["the fox runs", "the", "a dog sleeps over the fox", "fox fox"]


def test_a_decoder_gives_vectors_beside_text(start_server: Callable[..., Any], engine: Engine) -> None:
    server = start_server("--model", "pocket", "--dtype", "float32").wait_ready()
    wanted = [np.array(one.embedding) for one in engine.embed(TEXTS)]
    text = engine.generate("The sky", {"max_new_tokens": 8, "temperature": 0.0}).text

    def ask(number: int) -> None:
        if number % 2:
            params = {"max_new_tokens": 8, "temperature": 0.0}
            body: dict[str, Any] = {"text": "The sky", "sampling_params": params}
            assert httpx.post(server.url + "/generate", json=body, timeout=PATIENCE_S).json()["text"] == text
            return
        found = httpx.post(server.url + "/encode", json={"text": TEXTS}, timeout=PATIENCE_S).json()
        for one, vector in zip(found, wanted, strict=True):
            assert np.dot(one["embedding"], vector) > 0.99

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(24)))
    over = httpx.post(
        server.url + "/encode", json={"text": "Hello", "dimensions": 100_000}, timeout=PATIENCE_S
    )
    assert over.status_code == 400
    assert "dimensions" in over.text
    assert server.end() == 0
