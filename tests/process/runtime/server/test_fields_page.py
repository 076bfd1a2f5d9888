"""tutorials/fields.md says what the OpenAPI document and the routes say, and the routes do what it says."""

from __future__ import annotations

import re

import httpx
import pytest

from tests.process.runtime.server.fields_page import ELSEWHERE, PAGE, REFUSED, known, others, status, written

PROMPTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"model": "pocket", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1}},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/api/chat": {"model": "pocket", "messages": [{"role": "user", "content": "a"}], "stream": False},
    "/api/generate": {"model": "pocket", "prompt": "a", "stream": False},
}


def test_the_page_is_up_to_date() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert written(page) == page, "run: python -m tests.process.runtime.server.fields_page --write"
    assert len(re.findall(r"^\| `", page, re.MULTILINE)) > 300


@pytest.mark.parametrize("path", PROMPTS)
def test_what_is_said_to_be_refused_is_refused_by_name(client: httpx.Client, path: str) -> None:
    names = {name for by_server in others()[path].values() for name in by_server}
    refused = [name for name in sorted(names) if status(path, name, known()[path]).startswith("refused")]
    fields = known()[path]
    for name in refused:
        value = {"a": 1} if name in REFUSED.get(path, {}) and path == "/v1/responses" else ["x"]
        for given in (value, {"a": 1}):
            answer = client.post(path, json={**PROMPTS[path], name: given})
            assert answer.status_code == 400, (name, answer.text)
        assert name in answer.text
    defaults = {name: ELSEWHERE.get(name) for name in refused if name not in fields}
    assert client.post(path, json={**PROMPTS[path], **defaults}).status_code == 200
    assert refused or path in ("/detokenize", "/api/chat")
