"""Vectors over HTTP, without a socket: /v1/embeddings, /encode and /classify around an encoder."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from runtime.config.engine import EngineConfig
from runtime.config.serving.server import ServerConfig
from runtime.processes.pipeline.launch import Pipeline, launch
from runtime.server.app import build_app

TEXTS = ["the fox runs", "what is blue?", "the lazy dog"]


def start(case: Any) -> Pipeline:
    return launch(EngineConfig(model=str(case.path), device="cpu", dtype="float32", threads=1))


@pytest.fixture(scope="module")
def pipeline(tiny: Callable[[str], Any]) -> Iterator[Pipeline]:
    made = start(tiny("bert"))
    yield made
    made.close()


class Client:
    def __init__(self, pipeline: Pipeline) -> None:
        self._app = build_app(pipeline.manager, ServerConfig(served_model_name="tiny"))

    def __call__(self, method: str, path: str, body: Any = None) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.request(method, path, json=body, timeout=300)

        return asyncio.run(ask())


@pytest.fixture(scope="module")
def ask(pipeline: Pipeline) -> Client:
    return Client(pipeline)


def test_base64_is_the_same_as_numbers(ask: Client) -> None:
    numbers = ask("POST", "/v1/embeddings", {"model": "tiny", "input": TEXTS}).json()
    assert [one["index"] for one in numbers["data"]] == [0, 1, 2]
    assert numbers["usage"]["prompt_tokens"] == numbers["usage"]["total_tokens"] > 9
    packed = ask("POST", "/v1/embeddings", {"model": "tiny", "input": TEXTS, "encoding_format": "base64"})
    for one, other in zip(numbers["data"], packed.json()["data"], strict=True):
        raw = base64.b64decode(other["embedding"])
        np.testing.assert_allclose(struct.unpack(f"<{len(raw) // 4}f", raw), one["embedding"], atol=1e-6)
        assert abs(np.linalg.norm(one["embedding"]) - 1) < 1e-6
    cut = ask("POST", "/v1/embeddings", {"model": "tiny", "input": TEXTS[0], "dimensions": 5}).json()
    assert len(cut["data"][0]["embedding"]) == 5


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "empty"),
        ({"input": ["the", ""]}, "empty"),
        ({"input": "the", "dimensions": 49}, "48"),
        ({"input": "the", "dimensions": 0}, "dimensions"),
        ({"input": "dog " * 80}, "64"),
        ({"input": [1, 1000]}, "1000"),
    ],
)
def test_wrong_requests_are_400(ask: Client, body: dict[str, Any], words: str) -> None:
    answer = ask("POST", "/v1/embeddings", {"model": "tiny", **body})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_encode_reports_bad_items_and_goes_on(ask: Client) -> None:
    single = ask("POST", "/encode", {"text": TEXTS[0]}).json()
    assert single["meta_info"]["prompt_tokens"] == 5
    batch = ask("POST", "/encode", {"text": [TEXTS[0], "", TEXTS[1]]}).json()
    np.testing.assert_allclose(batch[0]["embedding"], single["embedding"], atol=1e-5)
    assert batch[1]["error"]["code"]
    assert not batch[1]["embedding"]
    assert batch[2]["embedding"]
    assert "error" not in batch[2]
    assert ask("POST", "/encode", {"text": ["", ""]}).status_code == 400


def test_an_encoder_says_that_it_does_not_generate_and_is_healthy(ask: Client) -> None:
    for path, body in (
        ("/generate", {"text": "the"}),
        ("/generate", {"text": ["the", "fox"]}),
        ("/v1/completions", {"model": "tiny", "prompt": "the"}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "the"}]}),
    ):
        answer = ask("POST", path, body)
        assert answer.status_code == 400, (path, answer.text)
        assert "computes vectors" in answer.text
    assert ask("GET", "/health_generate").status_code == 200
    assert ask("GET", "/model_info").json()["is_generation"] is False
    assert ask("GET", "/server_info").status_code == 200
    assert ask("GET", "/metrics").status_code == 200
    assert ask("GET", "/get_load").status_code == 200


def test_classify_scores_pairs(tiny: Callable[[str], Any]) -> None:
    made = start(tiny("bert, 1"))
    try:
        ask = Client(made)
        body = {"text": [["what is blue?", "the sky"], ["a", "b"]], "is_cross_encoder_request": True}
        answers = ask("POST", "/classify", body).json()
        assert [len(one["embedding"]) for one in answers] == [1, 1]
        assert all(0 < one["embedding"][0] < 1 for one in answers)
    finally:
        made.close()


def test_documents_are_ranked_by_a_cross_encoder(tiny: Callable[[str], Any]) -> None:
    made = start(tiny("bert, 1"))
    try:
        ask = Client(made)
        documents = ["the sky is blue", "the lazy dog", "red"]
        pairs = [["what is blue?", one] for one in documents]
        body = {"text": pairs, "is_cross_encoder_request": True}
        expected = [one["embedding"][0] for one in ask("POST", "/classify", body).json()]
        asked = {"query": "what is blue?", "documents": documents}
        results = ask("POST", "/v1/rerank", asked).json()["results"]
        found = {one["index"]: one["relevance_score"] for one in results}
        assert found == pytest.approx(dict(enumerate(expected)), rel=1e-4)
        scores = [one["relevance_score"] for one in results]
        assert scores == sorted(scores, reverse=True)
        refused = ask("POST", "/v1/rerank", {**asked, "instruct": "x"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "instruct")
    finally:
        made.close()


def test_pairs_are_scored_by_the_cosine_of_their_vectors(ask: Client) -> None:
    data = ask("POST", "/v1/embeddings", {"input": TEXTS}).json()["data"]
    vectors = np.array([one["embedding"] for one in data])
    body = {"text_1": TEXTS[0], "text_2": TEXTS, "model": "tiny"}
    answer = ask("POST", "/v1/score", body).json()
    found = [one["score"] for one in answer["data"]]
    np.testing.assert_allclose(found, vectors @ vectors[0], atol=1e-4)
    assert abs(found[0] - 1) < 1e-4
    assert answer["usage"]["prompt_tokens"] > 9
    both = ask("POST", "/v1/score", {"queries": TEXTS, "documents": TEXTS[::-1]}).json()["data"]
    expected = [vectors[at] @ vectors[2 - at] for at in range(3)]
    np.testing.assert_allclose([one["score"] for one in both], expected, atol=1e-4)
    refused = ask("POST", "/v1/score", {"text_1": TEXTS[:2], "text_2": TEXTS})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text_1")
    labels = ask("POST", "/v1/score", {"query": "a", "items": ["b"], "label_token_ids": [1]})
    assert (labels.status_code, labels.json()["error"]["param"]) == (400, "items")


def test_vectors_are_counted(ask: Client) -> None:
    def count(name: str) -> float:
        lines = ask("GET", "/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"sglang_dsl:{name}"))

    before = count("num_requests_total"), count("prompt_tokens_total")
    usage = ask("POST", "/v1/embeddings", {"model": "tiny", "input": TEXTS}).json()["usage"]
    after = count("num_requests_total"), count("prompt_tokens_total")
    assert (after[0] - before[0], after[1] - before[1]) == (3, usage["prompt_tokens"])
