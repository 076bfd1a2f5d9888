"""/v1/score and /v1/rerank around a model that generates; /v1/loads, /version, /ping, and the items that a
response was asked with."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from runtime.server.openai.scores import ANSWERS, INSTRUCTION, JUDGE

QUERY = "Is this positive or negative? "
PART = {"type": "input_text", "text": "And?"}
ITEMS = ["What a lovely garden!\n", "What an awful day!\n"]


def labels_of(client: httpx.Client) -> list[int]:
    words = ("positive", "negative")
    return [client.post("/tokenize", json={"prompt": word}).json()["tokens"][0] for word in words]


def test_labels_have_the_models_own_probabilities(client: httpx.Client) -> None:
    labels = labels_of(client)
    asked = {"query": QUERY, "items": ITEMS, "label_token_ids": labels, "model": "pocket"}
    answer = client.post("/v1/score", json=asked).json()
    assert (answer["object"], answer["model"]) == ("scoring", "pocket")
    ids: list[Any] = []
    for item, scores in zip(ITEMS, answer["scores"], strict=True):
        words = {"sampling_params": {"max_new_tokens": 1}, "token_ids_logprob": labels}
        meta = client.post("/generate", json={"text": QUERY + item, **words}).json()["meta_info"]
        [found] = meta["output_token_ids_logprobs"]
        expected = {token: math.exp(logprob) for logprob, token, _ in found}
        assert scores == pytest.approx([expected[label] for label in labels], rel=1e-3)
        ids.append(client.post("/tokenize", json={"prompt": QUERY + item}).json()["tokens"])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    soft = client.post("/v1/score", json={**asked, "apply_softmax": True}).json()["scores"]
    for scores, own in zip(soft, answer["scores"], strict=True):
        assert scores == pytest.approx([one / sum(own) for one in own], rel=1e-3)
    hot = client.post("/v1/score", json={**asked, "apply_softmax": True, "temperature": 1e6}).json()["scores"]
    assert hot[0] == pytest.approx([0.5, 0.5], abs=1e-3)
    as_ids = {**asked, "query": ids[0][:3], "items": [ids[0][3:], ids[1][3:]]}
    assert client.post("/v1/score", json=as_ids).json()["scores"][0] == pytest.approx(
        answer["scores"][0], rel=1e-3
    )
    turned = {**asked, "item_first": True, "query": ITEMS[0], "items": [QUERY]}
    assert client.post("/v1/score", json=turned).json()["scores"][0] == pytest.approx(
        answer["scores"][0], rel=1e-3
    )


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [1, 1]}, "label_token_ids"),
        ({"label_token_ids": [10**7]}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": [[1]]}, "items"),
        ({"query": None}, "query"),
        ({"temperature": 2.0}, "temperature"),
        ({"text_1": "a"}, "text_1"),
        ({"items": ["a"] * 65}, "items"),
        ({"items": None, "query": None, "label_token_ids": None}, "text_1"),
        ({"items": None}, "query"),
    ],
)
def test_what_cannot_be_scored_is_refused(client: httpx.Client, change: dict[str, Any], param: str) -> None:
    body = {"query": QUERY, "items": ITEMS, "label_token_ids": [1, 2], **change}
    answer = client.post("/v1/score", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_documents_are_ranked_by_what_the_model_would_answer(client: httpx.Client) -> None:
    documents = ["The river of Ostrel is Sarn.", "Mobi is a potter."]
    query = "Which river runs through Ostrel?"
    expected = []
    for document in documents:
        asked = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
        messages = [{"role": "system", "content": JUDGE}, {"role": "user", "content": asked}]
        turns = client.post("/tokenize", json={"messages": messages}).json()["tokens"]
        scored = client.post("/generate", json={"input_ids": turns, "choices": list(ANSWERS)}).json()[
            "choices"
        ]
        yes, no = (math.exp(sum(choice["logprobs"])) for choice in scored)
        expected.append(yes / (yes + no))
    body = {"query": query, "documents": [documents[0], {"text": documents[1]}], "model": "pocket"}
    answer = client.post("/v1/rerank", json=body).json()
    found = {one["index"]: one for one in answer["results"]}
    assert [found[0]["relevance_score"], found[1]["relevance_score"]] == pytest.approx(expected, rel=1e-3)
    scores = [one["relevance_score"] for one in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert found[1]["document"] == {"text": documents[1]}
    best = client.post("/rerank", json={**body, "top_n": 1, "return_documents": False}).json()["results"]
    score = pytest.approx(answer["results"][0]["relevance_score"], rel=1e-3)
    assert best == [{"index": answer["results"][0]["index"], "relevance_score": score, "document": None}]
    pairs = client.post("/v1/score", json={"text_1": query, "text_2": documents}).json()
    assert [one["score"] for one in pairs["data"]] == pytest.approx(expected, rel=1e-3)
    objects: dict[str, Any] = {**body, "documents": [{"text": text, "id": 1} for text in documents]}
    first = client.post("/tokenize", json={"prompt": documents, "add_special_tokens": False}).json()["tokens"]
    begun = client.post("/detokenize", json={"tokens": [ids[:2] for ids in first]}).json()["text"]
    same = (objects, body), ({**objects, "max_tokens_per_doc": 2}, {**body, "documents": begun})
    for one, two in same:
        found, wanted = (client.post("/v2/rerank", json=asked).json()["results"] for asked in (one, two))
        assert [ranked["index"] for ranked in found] == [ranked["index"] for ranked in wanted]
        scores = [ranked["relevance_score"] for ranked in found]
        assert scores == pytest.approx([ranked["relevance_score"] for ranked in wanted], rel=1e-3)
        assert found[0]["document"] == {"text": documents[found[0]["index"]]}  # as it was sent
    other = client.post("/v1/rerank", json={**body, "instruct": "Find potters"}).json()["results"]
    assert other != answer["results"]
    for wrong, param in (
        ({"documents": []}, "documents"),
        ({"top_n": -1}, "top_n"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"query": 3}, "query"),
    ):
        refused = client.post("/v1/rerank", json={**body, **wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert client.post("/v1/rerank", json={**body, "model": "none"}).status_code == 404


def test_how_busy_it_is_and_what_it_is(client: httpx.Client) -> None:
    client.post("/v1/completions", json={"prompt": "a b c", "max_tokens": 2})
    told = client.get("/v1/loads").json()
    [one] = told["loads"]
    assert told["dp_rank_count"] == 1
    assert (one["num_running_reqs"], one["num_waiting_reqs"], one["num_used_tokens"]) == (0, 0, 0)
    assert one["max_total_num_tokens"] == 16384
    assert 0 <= one["cache_hit_rate"] < 1
    assert told["aggregate"]["total_reqs"] == 0
    version = client.get("/server_info").json()["version"]
    assert client.get("/version").json()["version"] == told["version"] == version
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200


def test_the_items_of_a_response(client: httpx.Client) -> None:
    items = [{"role": "user", "content": "Hello", "id": "mine"}, {"role": "assistant", "content": "Hi"},
             {"type": "message", "role": "user", "content": [PART]}]  # fmt: skip
    made = client.post("/v1/responses", json={"input": items, "max_output_tokens": 2}).json()
    path = f"/v1/responses/{made['id']}/input_items"
    told = client.get(path, params={"order": "asc"}).json()
    assert [one["content"] for one in told["data"]] == [one["content"] for one in items]
    assert (told["data"][0]["id"], told["has_more"], told["object"]) == ("mine", False, "list")
    assert client.get(path).json()["data"] == told["data"][::-1]
    page = client.get(path, params={"order": "asc", "limit": 1}).json()
    assert (page["data"], page["has_more"]) == (told["data"][:1], True)
    rest = client.get(path, params={"order": "asc", "after": page["last_id"]}).json()
    assert (rest["data"], rest["has_more"]) == (told["data"][1:], False)
    text = client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 2}).json()
    [item] = client.get(f"/v1/responses/{text['id']}/input_items").json()["data"]
    assert item["content"] == [{"type": "input_text", "text": "Hello"}]
    for wrong in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}, {"after": "nobody"}):
        answer = client.get(path, params=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))
    assert client.get("/v1/responses/none/input_items").status_code == 404
