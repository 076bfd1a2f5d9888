"""How an error looks on the wire, for native and OpenAI clients alike.

    {"error": {"message", "type", "param", "code", "retryable", "request_id"},
     "object": "error", "message", "type", "param", "code"}

The same facts stand twice: OpenAI's clients read the inner object, older ones the outer. `mapped` gives a
fault the field names of a client's API: `max_tokens` for `sampling_params.max_new_tokens`. Knows no route.
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
    """The `type` of an error for OpenAI's clients."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


def error_body(fault: RuntimeFault) -> dict[str, Any]:
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
    if fault.status == 401:
        return {"www-authenticate": "Bearer"}
    if isinstance(fault, RateLimited):
        return {"retry-after": str(max(1, math.ceil(fault.retry_after_s)))}
    if fault.status == 503:
        return {"retry-after": str(RETRY_AFTER_S)}
    if fault.status == 408:
        # The rest of the body may still come, and would be read as a request.
        return {"connection": "close"}
    return {}


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an answered error and its causes. Their frames refer to the error and to the
    request's prompt, which would live until the next garbage collection."""
    current: BaseException | None = error
    for _ in range(16):  # errors may be each other's context
        if current is None:
            return
        current.__traceback__ = None
        current = current.__cause__ or current.__context__


def json_response(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """`data` (builtins, dataclasses or msgspec structs) as JSON; NaN and infinities become null."""
    return Response(msgspec.json.encode(data), status, headers, media_type="application/json")


def error_response(fault: RuntimeFault) -> Response:
    return json_response(error_body(fault), fault.status, error_headers(fault))


def from_http(error: HTTPException) -> RuntimeFault:
    """An error of Starlette's router (no such path, wrong method) as one of ours."""
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
_PATH = re.compile(r"(?:sampling_params(?:\[\d+\])?\.)?(\w+)(.*)", re.DOTALL)
_UNAMBIGUOUS = re.compile(r"\b(?:max_new_tokens|min_new_tokens|sampling_params)\b")
"""Names that mean nothing else in prose."""


def mapped(fault: RuntimeFault, names: FieldNames, context: int | None = None) -> RuntimeFault:
    """The same fault with the client's names in its path, message and hint. `context`: the most tokens of a
    request, for clients that look for them when it has more."""

    def renamed(text: str) -> str:
        return _UNAMBIGUOUS.sub(lambda match: names.get(match[0], match[0]), text)

    path, message = fault.where, fault.message
    if path is not None and (match := _PATH.fullmatch(path)) is not None:
        name = match[1]
        path = names.get(name, name) + match[2]
        if message.startswith(f"{name} "):
            message = names.get(name, name) + message[len(name) :]
    hint = None if fault.hint is None else renamed(fault.hint)
    message = renamed(message)
    if isinstance(fault, PromptTooLong) and context is not None:
        text = f"This model's maximum context length is {context} tokens: {message}"
        return ContextExceeded(text, where=path, hint=hint)
    return type(fault)(message, where=path, hint=hint)


@contextmanager
def mapped_errors(names: FieldNames, context: int | None = None) -> Iterator[None]:
    """Raise faults of the block with the client's names (see `mapped`)."""
    try:
        yield
    except RuntimeFault as fault:
        raise mapped(fault, names, context) from fault
