"""How an error looks on the wire, for native and OpenAI clients alike.

    {"error": {"message", "type", "param", "code", "retryable", "request_id"},
     "object": "error", "message", "type", "param", "code"}

The same facts stand twice: OpenAI's clients read the inner object, older ones the outer. Anthropic's own
shape is made where its routes are. Nothing here knows a route.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from runtime.processes.supervise.logs import REQUEST_ID
from runtime.protocol.errors import (
    BadRequest,
    ContextExceeded,
    MethodNotAllowed,
    NotFound,
    PromptTooLong,
    RateLimited,
    RuntimeFault,
)

RETRY_AFTER_S = 1
"""How long a client is asked to wait when the server is full."""


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    499: "aborted",
    501: "not_supported_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


def error_type(status: int) -> str:
    """The family of an error, in the words that OpenAI's clients know."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(fault: RuntimeFault) -> dict[str, Any]:
    """The error as JSON for native and OpenAI clients."""
    identity = REQUEST_ID.get()
    known = {} if identity is None else {"request_id": identity}
    facts = {
        "message": str(fault),
        "type": error_type(fault.status),
        "param": fault.where,
        "code": fault.code,
    }
    return {"error": {**facts, "retryable": fault.retryable, **known}, "object": "error", **facts}


def error_headers(fault: RuntimeFault) -> dict[str, str]:
    """Headers that go with the error's status."""
    if fault.status == 401:
        return {"www-authenticate": "Bearer"}
    if isinstance(fault, RateLimited):
        return {"retry-after": str(max(1, math.ceil(fault.retry_after_s)))}
    if fault.status == 503:
        return {"retry-after": str(RETRY_AFTER_S)}
    if fault.status == 408:
        return {
            "connection": "close"
        }  # the rest of the body may still come, and would be taken for a request
    return {}


def forget_frames(error: BaseException) -> None:
    """Once it was answered: an error that somebody keeps refers to the frames it passed, and through them to
    itself and to the whole request, which would wait for a collection of garbage: a long prompt, for long."""
    found: BaseException | None = error
    for _ in range(16):  # errors may be each other's context
        if found is None:
            return
        found.__traceback__ = None
        found = found.__cause__ or found.__context__


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`data` (builtins, dataclasses or msgspec structs) as JSON; NaN and infinities become null."""
    return Response(msgspec.json.encode(data), status, headers, media_type="application/json")


def error_response(fault: RuntimeFault) -> Response:
    """The answer to a request that failed before anything was sent."""
    return json_response(error_body(fault), fault.status, error_headers(fault))


def from_http(error: HTTPException) -> RuntimeFault:
    """The router's own refusals (no such path, wrong method) as one of ours."""
    match error.status_code:
        case 404:
            return NotFound("no such path", hint="GET /openapi.json lists the paths")
        case 405:
            allowed = (error.headers or {}).get("Allow", "")
            hint = f"it takes {allowed}"
            if allowed == "POST":
                hint = "send POST, with the header Content-Type: application/json"
            return MethodNotAllowed("this path does not support the method", hint=hint)
        case _:
            return BadRequest(error.detail)


FieldNames = Mapping[str, str]
"""The runtime's name of a field -> the client's."""
_PLACE = re.compile(r"(?:sampling_params(?:\[\d+\])?\.)?(\w+)(.*)", re.DOTALL)
_OWN_ONLY = re.compile(r"\b(?:max_new_tokens|min_new_tokens|sampling_params)\b")


def mapped(fault: RuntimeFault, names: FieldNames, context: int | None = None) -> RuntimeFault:
    """The same fault with the client's names in its place, its message and its hint. `context`: tokens that
    a request may have, for clients that look for them when it has more."""
    where, message = fault.where, fault.message
    if where is not None and (found := _PLACE.fullmatch(where)) is not None:
        own, named = found[1], names.get(found[1], found[1])
        where = named + found[2]
        if message.startswith(f"{own} "):
            message = named + message[len(own) :]
    hint = None if fault.hint is None else _renamed(fault.hint, names)
    message = _renamed(message, names)
    if isinstance(fault, PromptTooLong) and context is not None:
        text = f"This model's maximum context length is {context} tokens: {message}"
        return ContextExceeded(text, where=where, hint=hint)
    return type(fault)(message, where=where, hint=hint)


def _renamed(text: str, names: FieldNames) -> str:
    """Only names that are nothing but names are looked for in prose."""
    return _OWN_ONLY.sub(lambda found: names.get(found[0], found[0]), text)


@contextmanager
def mapped_errors(names: FieldNames, context: int | None = None) -> Iterator[None]:
    """Faults that leave the block are reported in the client's names (see `mapped`)."""
    try:
        yield
    except RuntimeFault as fault:
        raise mapped(fault, names, context) from fault
