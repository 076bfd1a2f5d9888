"""RequestFacts: the fields of a body that the router reads. The body itself is passed on as it came: if it is
not JSON, or has another shape, the worker reports what is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

MOST_PROMPT = 128 << 10
"""Bytes of a prompt that are compared, at most."""
_NOTHING = msgspec.Raw(b"")
_NAMESPACE = ("model", "lora_path", "extra_key", "cache_salt")
_PROMPT = ("tools", "instructions", "system", "text", "input_ids", "prompt", "messages", "input")


class _Body(msgspec.Struct):
    """Fields of all routes. Raw: JSON of any type."""

    model: msgspec.Raw = _NOTHING
    lora_path: msgspec.Raw = _NOTHING
    extra_key: msgspec.Raw = _NOTHING
    cache_salt: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    instructions: msgspec.Raw = _NOTHING
    system: msgspec.Raw = _NOTHING
    text: msgspec.Raw = _NOTHING
    input_ids: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    input: msgspec.Raw = _NOTHING
    session_id: Any = None
    session_params: Any = None
    routing_key: Any = None
    prompt_cache_key: Any = None
    previous_response_id: Any = None
    timeout_s: Any = None


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """prompt: what a cached prefix depends on (see Policy.choose)
    held     the session or earlier response that only one worker has; None: any can answer
    program  requests with the same one should go to the same worker
    timeout_s  seconds for all attempts together
    """

    prompt: bytes = b""
    held: str | None = None
    program: str | None = None
    timeout_s: float | None = None


def read_facts(body: bytes) -> RequestFacts:
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, RecursionError):
        return RequestFacts()
    parts = [bytes(getattr(fields, name)) for name in (*_NAMESPACE, *_PROMPT)]
    prompt = b"\n".join(part[:MOST_PROMPT] for part in parts if part)[:MOST_PROMPT]
    program = _text(fields.routing_key) or _text(fields.prompt_cache_key)
    limit = fields.timeout_s
    timed = isinstance(limit, int | float) and not isinstance(limit, bool) and limit > 0
    return RequestFacts(prompt, _held(fields), program, float(limit) if timed else None)


def _held(body: _Body) -> str | None:
    listed = body.session_id if isinstance(body.session_id, list) else [body.session_id]
    params = body.session_params if isinstance(body.session_params, list) else [body.session_params]
    named = [*listed, *(one.get("id") for one in params if isinstance(one, Mapping))]
    named.append(body.previous_response_id)
    return next((name for name in map(_text, named) if name is not None), None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
