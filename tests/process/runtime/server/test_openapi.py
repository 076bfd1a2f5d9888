"""The OpenAPI document: sound in itself, and true of the routes."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import msgspec
import pytest

from runtime.protocol.errors import BadRequest
from runtime.server.app import MODULES, describe
from runtime.server.http.errors import error_body
from runtime.server.http.openapi import ErrorBody, Operation, body_schema, document
from runtime.server.native import generate as native

METHODS = {"get", "post", "put", "delete"}
DOCUMENT: dict[str, Any] = json.loads(msgspec.json.encode(describe(secured=True)))


def walk(value: Any) -> Any:
    yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from walk(inner)


def test_every_reference_leads_somewhere() -> None:
    found = [node["$ref"] for node in walk(DOCUMENT) if isinstance(node, dict) and "$ref" in node]
    assert found
    for reference in found:
        place: Any = DOCUMENT
        for step in reference.removeprefix("#/").split("/"):
            place = place[step]


def test_every_schema_is_a_schema() -> None:
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_no_path_is_described_twice() -> None:
    keys = list(itertools.chain.from_iterable(module.OPENAPI for module in MODULES))
    assert len(keys) == len(set(keys))


def test_operation_ids_are_unique_and_paths_have_their_parameters() -> None:
    ids = [entry["operationId"] for item in DOCUMENT["paths"].values() for entry in item.values()]
    assert len(ids) == len(set(ids))
    for path, item in DOCUMENT["paths"].items():
        for entry in item.values():
            named = {p["name"] for p in entry.get("parameters", ()) if p["in"] == "path"}
            assert named == {part[1:-1] for part in path.split("/") if part.startswith("{")}


def test_only_public_paths_need_no_key() -> None:
    free = {
        path
        for path, item in DOCUMENT["paths"].items()
        for method, entry in item.items()
        if method in METHODS and "security" not in entry
    }
    assert free == {"/health", "/health_generate", "/ready"}


def test_a_body_of_generate_is_described_without_what_is_internal() -> None:
    schema = DOCUMENT["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "http_worker_ipc" not in schema["properties"]
    assert "type" not in schema["properties"]
    whole = {**schema, "components": DOCUMENT["components"]}
    checker = jsonschema.Draft202012Validator(whole)
    good = {"text": ["a", "b"], "sampling_params": {"n": 2}, "stream": True, "stream_output": True,
            "rid": "x", "messages": [{"role": "user", "content": "hi"}]}  # fmt: skip
    assert checker.is_valid(good)
    assert not checker.is_valid({"text": 3})
    assert not checker.is_valid({"txt": "a"})
    assert native.Generate.OPENAPI["POST /generate"].stream


def test_the_shape_of_errors_is_the_described_one() -> None:
    made = error_body(BadRequest("no", where="text"))
    assert msgspec.convert(made, ErrorBody).error.param == "text"


def test_a_struct_without_some_fields_and_with_others() -> None:
    class Thing(msgspec.Struct, tag=True):
        a: int
        b: str = ""

    made = body_schema(Thing, without=("b",), plus={"c": {"type": "null"}})
    assert made.names == {"a", "c"}
    assert made.schema["required"] == ["a"]
    assert made.schema["additionalProperties"] is False


@pytest.mark.parametrize("secured", [True, False])
def test_security_is_described_where_there_is_a_key(secured: bool) -> None:
    made = document("t", "1", [{"GET /a": Operation("a")}], secured)
    assert ("securitySchemes" in made["components"]) is secured
