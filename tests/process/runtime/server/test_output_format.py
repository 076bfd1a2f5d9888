"""What bodies ask their output to match: every name of it, on every route, and how a wrong one is told."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from runtime.protocol.constraint import JSON_OPTIONS
from runtime.protocol.sampling import CONSTRAINT_KEYS

SCHEMA = {
    "type": "object",
    "properties": {"town": {"enum": ["Ostrel", "Karsk"]}, "cold": {"type": "boolean"}},
    "required": ["town", "cold"],
    "additionalProperties": False,
}
WRONG_SCHEMA = {"type": "object", "properties": {"a": {"items": {"type": "strin"}}}}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "<t>",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "</t>",
    },
}
OLDER = {"structures": [{"begin": "<t>", "schema": SCHEMA, "end": "</t>"}], "triggers": ["<t>"]}
SAID = [{"role": "user", "content": "Is it cold in Ostrel?"}]
CHAT: dict[str, Any] = {"model": "pocket", "messages": SAID, "max_tokens": 60, "temperature": 0}
TEXT: dict[str, Any] = {"model": "pocket", "prompt": "Is it cold?", "max_tokens": 60, "temperature": 0}


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(client: httpx.Client, path: str, **words: Any) -> str:
    """The text that a route of OpenAI's gives."""
    answer = post(client, path, {**(CHAT if "chat" in path else TEXT), **words})
    choice = answer["choices"][0]
    return str(choice["message"]["content"] if "chat" in path else choice["text"])


def is_town(text: str) -> bool:
    found = json.loads(text)
    return set(found) == {"town", "cold"} and found["town"] in ("Ostrel", "Karsk")


def schema_format(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, **more}}


KEPT: list[tuple[dict[str, Any], Any]] = [
    ({"response_format": schema_format(SCHEMA, strict=True, description="The weather")}, is_town),
    ({"response_format": schema_format(SCHEMA, strict=False)}, is_town),
    ({"response_format": {"type": "structural_tag", **TAG}}, lambda text: is_town(text[3:-4])),
    ({"response_format": {"type": "text"}, "regex": "[a-c]{3}"}, lambda text: re.fullmatch("[a-c]{3}", text)),
    ({"json_schema": SCHEMA}, is_town),
    ({"json_schema": json.dumps(SCHEMA)}, is_town),
    ({"json_schema": SCHEMA, "whitespace": "compact"}, lambda text: is_town(text) and " " not in text),
    (
        {"json_schema": {"type": "string", "format": "date", "enum": ["x"]}, "schema_format": "annotation"},
        lambda text: text == '"x"',
    ),
    ({"structural_tag": TAG}, lambda text: is_town(text[3:-4])),
    ({"structural_tag": json.dumps(TAG)}, lambda text: is_town(text[3:-4])),
    ({"regex": "[0-9]{4}"}, lambda text: re.fullmatch("[0-9]{4}", text)),
    ({"ebnf": 'root ::= "x" [0-9] "y"'}, lambda text: re.fullmatch("x[0-9]y", text)),
    ({"choices": ["one way", "or another"]}, lambda text: text in ("one way", "or another")),
    ({"guided_json": SCHEMA}, is_town),
    ({"guided_regex": "[0-9]{4}"}, lambda text: re.fullmatch("[0-9]{4}", text)),
    ({"guided_choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
    ({"guided_grammar": 'root ::= "x" [0-9]'}, lambda text: re.fullmatch("x[0-9]", text)),
    ({"structured_outputs": {"json": SCHEMA}}, is_town),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
]


@pytest.mark.parametrize(("words", "kept"), KEPT, ids=[str(words)[:50] for words, _ in KEPT])
def test_it_is_kept(client: httpx.Client, words: dict[str, Any], kept: Any) -> None:
    # Both of OpenAI's routes read it in one place: by turns.
    path = "/v1/completions" if "regex" in words or len(str(words)) % 2 else "/v1/chat/completions"
    assert kept(said(client, path, **words))


def test_a_json_object_is_an_object(client: httpx.Client) -> None:
    for words in (
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
    ):
        text = said(client, "/v1/chat/completions", **words, max_tokens=40, seed=3, temperature=1)
        assert text.startswith("{")


def test_the_older_form_of_a_structural_tag_leaves_free_text_free(client: httpx.Client) -> None:
    form = {"type": "structural_tag", **OLDER}
    text = said(client, "/v1/chat/completions", response_format=form, logit_bias={})
    assert "<t>" not in text or is_town(text.partition("<t>")[2].partition("</t>")[0])


def test_the_other_interfaces(client: httpx.Client) -> None:
    for form in (
        {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True},
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": SCHEMA}},
    ):
        body = {"input": "Is it cold?", "max_output_tokens": 60, "temperature": 0, "text": {"format": form}}
        answer = post(client, "/v1/responses", body)
        assert is_town(answer["output"][0]["content"][0]["text"])
        assert answer["text"]["format"] == form
    shape = {"type": "json_schema", "schema": SCHEMA}
    for config in ({"output_config": {"format": shape}}, {"output_format": shape}):
        answer = post(client, "/v1/messages", {**CHAT, **config})
        assert is_town(answer["content"][0]["text"])


def test_the_native_route_takes_every_kind(client: httpx.Client) -> None:
    for words, kept in KEPT:
        if not words.keys() <= {*CONSTRAINT_KEYS, *JSON_OPTIONS}:
            continue
        params = {"max_new_tokens": 60, "temperature": 0, **words}
        assert kept(post(client, "/generate", {"text": "Is it cold?", "sampling_params": params})["text"])
    constraint = {"kind": "json_schema", "spec": json.dumps(SCHEMA), "whitespace": "compact"}
    params = {"max_new_tokens": 60, "temperature": 0}
    text = post(client, "/generate", {"text": "It", "sampling_params": params, "constraint": constraint})[
        "text"
    ]
    assert is_town(text)
    assert " " not in text


# -- what is wrong -------------------------------------------------------------------------------------------

PLACE = "#/properties/a/items/type"
BAD: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": schema_format(WRONG_SCHEMA)},
        f"response_format.json_schema.schema {PLACE}",
        "not 'strin'",
    ),
    ("/v1/completions", {**TEXT, "json_schema": WRONG_SCHEMA}, f"json_schema {PLACE}", "not 'strin'"),
    ("/v1/completions", {**TEXT, "guided_json": WRONG_SCHEMA}, f"guided_json {PLACE}", "not 'strin'"),
    (
        "/v1/chat/completions",
        {**CHAT, "structured_outputs": {"json": WRONG_SCHEMA}},
        f"structured_outputs.json {PLACE}",
        "not 'strin'",
    ),
    (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_schema", "name": "x", "schema": WRONG_SCHEMA}}},
        f"text.format.schema {PLACE}",
        "not 'strin'",
    ),
    (
        "/v1/messages",
        {**CHAT, "output_config": {"format": {"type": "json_schema", "schema": WRONG_SCHEMA}}},
        "",
        f"output_config.format.schema {PLACE}: type must be",
    ),
    (
        "/v1/messages",
        {**CHAT, "output_format": {"type": "json_schema", "schema": WRONG_SCHEMA}},
        "",
        f"output_format.schema {PLACE}: type must be",
    ),
    (
        "/v1/messages",
        {**CHAT, "output_format": {"type": "json"}},
        "",
        "output_format: must be {",
    ),
    (
        "/generate",
        {"text": "x", "sampling_params": {"json_schema": WRONG_SCHEMA}},
        f"json_schema {PLACE}",
        "not 'strin'",
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "json_schema": '{"type": "object",\n "properties": }'},
        "json_schema",
        "line 2, column 16",
    ),
    ("/v1/chat/completions", {**CHAT, "ebnf": 'root ::= "a"\n  b'}, "ebnf", "line 2"),
    ("/v1/chat/completions", {**CHAT, "guided_grammar": "root ::= thing"}, "guided_grammar", "column 10"),
    ("/v1/completions", {**TEXT, "regex": "a(b"}, "regex", "position"),
    ("/v1/completions", {**TEXT, "regex": "a(?=b)"}, "regex", "look-ahead"),
    (
        "/v1/chat/completions",
        {**CHAT, "structural_tag": {"type": "structural_tag", "format": {"type": "tags"}}},
        "structural_tag /format",
        "'tags' is not kept",
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "structural_tag", "format": {"type": "tags"}}},
        "response_format /format",
        "'tags' is not kept",
    ),
    ("/v1/chat/completions", {**CHAT, "regex": "a", "ebnf": "b"}, "ebnf", "got regex and ebnf"),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_object"}, "choices": ["a"]},
        "response_format",
        "got choices and response_format",
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "guided_json": {}, "json_schema": {}},
        "guided_json",
        "got json_schema and guided_json",
    ),
    (
        "/generate",
        {"text": "x", "sampling_params": {"regex": "a", "choices": ["b"]}},
        "sampling_params",
        "got regex and choices",
    ),
    (
        "/generate",
        {"text": "x", "sampling_params": {"choices": []}},
        "sampling_params.choices",
        "none of them empty",
    ),
    (
        "/generate",
        {"text": "x", "sampling_params": {"whitespace": "compact"}},
        "sampling_params.whitespace",
        "needs json_schema",
    ),
    (
        "/generate",
        {"text": "x", "sampling_params": {"json_schema": {}, "whitespace": "wide"}},
        "whitespace",
        "compact, single, flexible",
    ),
    ("/v1/completions", {**TEXT, "whitespace": "compact"}, "whitespace", "needs a JSON schema"),
    ("/v1/completions", {**TEXT, "schema_format": "annotation"}, "schema_format", "needs a JSON schema"),
    ("/v1/completions", {**TEXT, "schema_format": "off", "json_schema": {}}, "schema_format", "'off'"),
    ("/v1/completions", {**TEXT, "whitespace": "compact", "regex": "a"}, "whitespace", "not regex"),
    ("/v1/completions", {**TEXT, "choices": []}, "choices", "none of them empty"),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_object", "json_schema": {"name": "x"}}},
        "response_format.json_schema",
        "cannot be combined with type 'json_object'",
    ),
    (
        "/v1/chat/completions",
        {**CHAT, "response_format": {"type": "json_schema", "json_shema": {"name": "a"}}},
        "response_format.json_shema",
        "json_shema",
    ),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    (
        "/v1/chat/completions",
        {**CHAT, "structured_outputs": {"json": {}, "regex": "a"}},
        "structured_outputs",
        "got json and regex",
    ),
    (
        "/v1/responses",
        {"input": "x", "text": {"format": {"type": "json_object", "schema": {}}}},
        "text.format.schema",
        "cannot be combined with",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body", "param", "message"), BAD, ids=lambda case: str(case)[:60])
def test_what_is_wrong_is_told_with_its_place_before_anything_is_sent(
    client: httpx.Client, path: str, body: dict[str, Any], param: str, message: str, stream: bool
) -> None:
    answer = client.post(path, json={**body, "stream": stream})
    assert answer.status_code == 400, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    error = answer.json()["error"]
    assert message in error["message"]
    if param:
        assert error["param"] == param
