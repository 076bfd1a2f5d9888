"""Null and false for what is not used: clients send whole structs of which most is empty. All routes take
it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from runtime.server.app import describe

DOCUMENT: dict[str, Any] = json.loads(msgspec.json.encode(describe()))
TURNS = [{"role": "user", "content": "Hello", "later": None, "name": None}]
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "boolean"}}}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 1, "later": None, "never": False}},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/completions": {"prompt": "a", "max_tokens": 1, "response_format": FORM},
    "/v1/chat/completions": {"messages": TURNS, "max_tokens": 1, "response_format": FORM},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "text": {"format": {"type": "text"}}},
    "/v1/messages": {"model": "pocket", "messages": TURNS, "max_tokens": 1, "thinking": {"type": "disabled"}},
    "/v1/messages/count_tokens": {"model": "pocket", "messages": TURNS},
    "/abort_request": {"rid": "nobody"},
    "/pause_generation": {"mode": "in_place"},
    "/continue_generation": {},
    "/configure_logging": {},
    "/set_internal_state": {"server_args": {}},
    "/precompile": {"constraints": [{"kind": "regex", "spec": "a"}]},
}


def fields_of(path: str) -> dict[str, Any]:
    operation = DOCUMENT["paths"][path]["post"]
    if "requestBody" not in operation:
        return {}
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    if "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return {name: one for name, one in schema["properties"].items() if name not in schema.get("required", ())}


def takes_false(schema: Any) -> bool:
    return any(
        one.get("type") in ("boolean", ["boolean", "null"])
        or not one.keys() & {"type", "$ref", "enum", "anyOf"}
        for one in (schema, *schema.get("anyOf", ()))
    )


def nothing(value: Any, said: Any) -> Any:
    """The same with an unknown field in each object (settings have no false)."""
    match value:
        case {"server_args": {}}:
            return value | {"of_a_later_version": said, "server_args": {"of_a_later_version": None}}
        case {**pairs}:
            return {name: nothing(one, said) for name, one in pairs.items()} | {"of_a_later_version": said}
        case _:
            return value


@pytest.mark.parametrize(
    ("path", "empty"),
    [
        ("/v1/chat/completions", {
            "functions": [], "audio": {}, "prediction": {}, "modalities": [], "moderation": {}, "tools": [],
            "logprobs": False, "top_logprobs": 0, "metadata": {}, "logit_bias": {}, "stop": [],
        }),
        ("/v1/responses", {
            "context_management": [], "prompt": {}, "conversation": "", "tools": [], "metadata": {},
            "include": ["reasoning.encrypted_content"],
        }),
    ],
)  # fmt: skip
def test_nor_do_empty_ones(client: httpx.Client, path: str, empty: dict[str, Any]) -> None:
    for name, value in empty.items():
        answer = client.post(path, json={**BODIES[path], name: value})
        assert answer.status_code == 200, (name, answer.text)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("said", [None, False])
def test_it_changes_nothing(client: httpx.Client, path: str, said: bool | None) -> None:
    body, fields = BODIES[path], fields_of(path)
    empty = {name: said for name, one in fields.items() if said is None or not takes_false(one)}
    whole = {**empty, **nothing(body, said)}
    if path == "/generate":
        whole["sampling_params"] = {**body["sampling_params"], "of_a_later_version": said}
    answer = client.post(path, json=whole)
    assert answer.status_code == 200, (whole, answer.text)
    for value in (1, "on", True, {"a": 1}):
        refused = client.post(path, json={**body, "of_a_later_version": value})
        assert refused.status_code == 400 or path == "/continue_generation", (value, refused.text)
    if path == "/pause_generation":
        client.post("/continue_generation", json={})
