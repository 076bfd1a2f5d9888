"""The OpenAPI 3.1 document, built from the operations of all routes: "METHOD /path" -> Operation. Knows no
route.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime.server.http.errors import error_type


@dataclass(frozen=True, slots=True)
class Operation:
    """The description of one method of one path.

    request     a msgspec type, a Body or a JSON schema of the body; None: no body
    response    a msgspec type or schema of the answer with `status`; None: any JSON; "text": plain text
    stream      the answer may be server-sent events, with "stream": true
    lines       the answer may be lines of JSON
    empty_ok    the body is optional
    errors      statuses of errors besides those that every path has (401, 413, 500, 503, ...)
    query       query parameter -> JSON schema; path: the same for parameters of the path
    error       the schema of an error's body; None: the common shape
    plain_errors  errors may also be plain text
    """

    summary: str
    request: Any = None
    response: Any = None
    stream: bool = False
    lines: bool = False
    empty_ok: bool = False
    errors: tuple[int, ...] = ()
    status: int = 200
    query: Mapping[str, Any] = field(default_factory=dict)
    path: Mapping[str, Any] = field(default_factory=dict)
    error: Any = None
    plain_errors: bool = False
    tag: str = "native"
    public: bool = False


@dataclass(frozen=True, slots=True)
class Body:
    """A body's schema that differs from a struct's: see `body_schema`."""

    schema: dict[str, Any]
    components: dict[str, Any]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self.schema["properties"])


def body_schema(
    kind: Any,
    *,
    without: Collection[str] = (),
    plus: Mapping[str, Any] | None = None,
    types: Mapping[str, Any] | None = None,
) -> Body:
    """The schema of a struct as clients send it: without its tag and the fields of `without`, with the fields
    of `plus`, and with the schemas of `types` instead of those of the annotations."""
    (reference,), components = msgspec.json.schema_components([kind], ref_template=_REF)
    struct = components.pop(reference["$ref"].rsplit("/", 1)[1])
    dropped = {*without, "type"}
    properties = {name: field for name, field in struct["properties"].items() if name not in dropped}
    properties.update(types or {})
    properties.update(plus or {})
    schema = {
        "title": struct["title"],
        "type": "object",
        "properties": properties,
        "required": [name for name in struct.get("required", ()) if name not in dropped],
        "additionalProperties": False,
    }
    return Body(schema, components)


class ErrorFacts(msgspec.Struct):
    """One error, as OpenAI's clients know it. param: the path of a field; code: the kind of error;
    request_id: as in the header x-request-id."""

    message: str
    type: str
    param: str | None
    code: str
    retryable: bool = False
    request_id: str | msgspec.UnsetType = msgspec.UNSET


class ErrorBody(msgspec.Struct):
    """The common shape of errors."""

    error: ErrorFacts
    object: str
    message: str
    type: str
    param: str | None
    code: str


_REF = "#/components/schemas/{name}"
_EVERYWHERE = (401, 403, 404, 405, 500, 503)
_WITH_BODY = (400, 408, 413, 415)


def document(
    title: str, version: str, tables: Sequence[Mapping[str, Operation]], secured: bool
) -> dict[str, Any]:
    """The whole document. `secured`: an API key is required."""
    operations = {key: operation for table in tables for key, operation in table.items()}
    types = [ErrorBody]
    for operation in operations.values():
        for kind in (operation.request, operation.response, operation.error):
            if kind is not None and not isinstance(kind, (str, dict, Body)) and kind not in types:
                types.append(kind)
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    for operation in operations.values():
        if isinstance(operation.request, Body):
            components.update(operation.request.components)
    by_type = list(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for key, operation in operations.items():
        method, path = key.split(" ", 1)
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, by_type, secured)
    whole: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": paths,
        "components": {"schemas": components},
    }
    if secured:
        whole["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return whole


def _operation(
    method: str, path: str, operation: Operation, types: Sequence[tuple[Any, Any]], secured: bool
) -> dict[str, Any]:
    def schema(kind: Any) -> Any:
        if isinstance(kind, Body):
            return kind.schema
        if isinstance(kind, dict):
            return kind
        return next(schema for known, schema in types if known is kind or known == kind)

    error = {"application/json": {"schema": schema(operation.error or ErrorBody)}}
    if operation.plain_errors:
        error["text/plain"] = {"schema": {"type": "string"}}
    answer: dict[str, Any]
    match operation.response:
        case _ if operation.status >= 400:
            answer = error
        case None:
            answer = {"application/json": {"schema": {}}}
        case "text":
            answer = {"text/plain": {"schema": {"type": "string"}}}
        case kind:
            answer = {"application/json": {"schema": schema(kind)}}
    if operation.stream:
        answer["text/event-stream"] = {}
    if operation.lines:
        answer["application/x-ndjson"] = {}
    statuses = {*_EVERYWHERE, *operation.errors, *(_WITH_BODY if operation.request is not None else ())}
    if method == "POST":
        statuses.add(415)  # an order without a body needs the header, too
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{method.lower()}{path.replace('/', '_').replace('{', '').replace('}', '')}",
        "tags": [operation.tag],
        "responses": {
            str(operation.status): {"description": _meaning(operation.status), "content": answer},
            **{str(s): {"description": _meaning(s), "content": error} for s in sorted(statuses)},
        },
    }
    if operation.request is not None:
        content = {"application/json": {"schema": schema(operation.request)}}
        described["requestBody"] = {"required": not operation.empty_ok, "content": content}
    names = [part[1:-1].split(":")[0] for part in path.split("/") if part.startswith("{")]
    parameters = [
        {"name": n, "in": "path", "required": True, "schema": operation.path.get(n, {"type": "string"})}
        for n in names
    ]
    parameters += [{"name": n, "in": "query", "schema": s} for n, s in operation.query.items()]
    if parameters:
        described["parameters"] = parameters
    if secured and not operation.public:
        described["security"] = [{"key": []}]
    return described


def _meaning(status: int) -> str:
    return "done" if status < 400 else error_type(status)
