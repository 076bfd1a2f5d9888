"""What goes into and comes out of /v1/responses, and the responses that are kept."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from runtime.protocol.messages import Message
from runtime.server.http.errors import NotFound

MAX_KEPT = 1024
MAX_TOP_LOGPROBS = 20


class TextFormat(msgspec.Struct, forbid_unknown_fields=True):
    """The schema is kept whatever `strict` says; without one, any JSON is. type "structural_tag" has
    `format`, or the older `structures` and `triggers`, beside the type."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"
    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None
    description: str | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None
    format: dict[str, Any] | None = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's fields, and `top_k`, `min_p`, `seed` beside them. Fields about accounts have no effect."""

    input: str | list[dict[str, Any]]
    model: str = "default"
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    include: list[str] | None = None
    text: TextOptions | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    prompt: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    moderation: dict[str, Any] | None = None
    context_management: list[dict[str, Any]] | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None


class ResponseObject(msgspec.Struct, kw_only=True):
    """status: queued, in_progress, completed, incomplete, failed or cancelled."""

    id: str
    created_at: int
    model: str
    status: str
    output: list[dict[str, Any]] = []
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, Any] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = {}
    background: bool = False
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = {}
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_p: float | None = None
    truncation: str = "disabled"
    usage: dict[str, Any] | None = None
    user: str | None = None
    object: str = "response"


class Deleted(msgspec.Struct):
    id: str
    deleted: bool = True
    object: str = "response"


@dataclass
class Kept:
    """A response, the conversation that led to it, and the task that works on it."""

    response: ResponseObject
    messages: list[Message]
    task: asyncio.Task[None] | None = None


@dataclass
class Store:
    """The newest responses by id."""

    limit: int = MAX_KEPT
    kept: OrderedDict[str, Kept] = field(default_factory=OrderedDict)

    def put(self, kept: Kept) -> None:
        self.kept[kept.response.id] = kept
        while len(self.kept) > self.limit:
            _, oldest = self.kept.popitem(last=False)
            if oldest.task is not None:
                oldest.task.cancel()

    def get(self, identity: str, where: str = "response_id") -> Kept:
        found = self.kept.get(identity)
        if found is None:
            raise NotFound(f"no response {identity[:80]!r} is kept", where=where)
        return found
