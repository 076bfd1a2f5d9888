"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface, streamed or whole. Source of the
shapes: Anthropic's API reference, version 2023-06-01."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from runtime.formats.reply import ContentDelta, ReasoningDelta, ReplyEvent, ToolCallDelta
from runtime.processes.supervise.logs import REQUEST_ID
from runtime.protocol.errors import BadRequest, NotSupported, RuntimeFault
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.request_base import new_rid
from runtime.server.anthropic.messages import messages_of, tools_of
from runtime.server.context import RouteGroup, ServerContext, serves
from runtime.server.http.body import check_range
from runtime.server.http.errors import mapped_errors
from runtime.server.http.openapi import Operation
from runtime.server.http.sse import event
from runtime.server.openai.params import check_model
from runtime.server.replies import Generation, continued, shown_marks, thinking_switch
from runtime.server.tool_use import ToolUse

PREFIXES = ("/v1/messages",)
"""Paths whose errors have Anthropic's shape."""
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    501: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_NAMES = {
    "max_new_tokens": "max_tokens", "stop": "stop_sequences", "json_schema": "output_config.format.schema",
}  # fmt: skip
"""The runtime's names of fields -> those of these routes."""
_BOOTSTRAP = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
_UP_TO_THE_MODEL = ("adaptive", "between_tools")
"""Kinds of `thinking` that let the model decide."""


class Prompting(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of both routes. Those about accounts, cache hints and beta services have no effect: all prefixes
    are cached. cache_salt: an extension (see GenerateReqInput)."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    speed: str | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    cache_salt: str | None = None


class MessagesRequest(Prompting):
    """As in Anthropic's reference; the bootstrap fields are set by a router (see GenerateReqInput)."""

    max_tokens: int
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    container: str | dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] | None = None
    context_management: dict[str, Any] | None = None
    diagnostics: dict[str, Any] | None = None
    inference_geo: str | None = None
    output_format: dict[str, Any] | None = None
    bootstrap_host: str | None = None
    bootstrap_port: int | None = None
    bootstrap_room: int | None = None


class Usage(msgspec.Struct):
    """input_tokens: prompt tokens, without those from the cache if the server reports them."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessageReply(msgspec.Struct):
    id: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage
    type: str = "message"
    role: str = "assistant"


class TokenCount(msgspec.Struct):
    input_tokens: int


class ErrorFacts(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct):
    error: ErrorFacts
    type: str = "error"
    request_id: str | None = None


_operation = partial(Operation, error=AnthropicError, tag="anthropic")
_MESSAGES = _operation(
    "Chat completion (Anthropic API)", MessagesRequest, MessageReply, stream=True, errors=(404, 501, 504)
)
_COUNT = _operation("Count the tokens of a conversation", Prompting, TokenCount, errors=(404, 501))


def error_body(fault: RuntimeFault) -> dict[str, Any]:
    kind = _ERROR_TYPES.get(fault.status, "api_error" if fault.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(fault)}, "request_id": REQUEST_ID.get()}


def fault_event(fault: RuntimeFault) -> bytes:
    return event(error_body(fault), "error")


class Messages(RouteGroup):
    @serves(_MESSAGES, "POST /v1/messages")
    async def messages(self, request: Request) -> Any:
        job = await self._ctx.admit(request, MessagesRequest, partial(_Job, self._ctx))
        return await self._ctx.reply(request, job, fault_event)

    @serves(_COUNT, "POST /v1/messages/count_tokens")
    async def count(self, request: Request) -> TokenCount:
        return await self._ctx.admit(request, Prompting, self._counted, encodes=True)

    def _counted(self, body: Prompting) -> TokenCount:
        with mapped_errors(_NAMES):
            fields, _ = _prompt(self._ctx, body)
            return TokenCount(len(self._ctx.manager.prompt_ids(GenerateReqInput(**fields))))


def _prompt(
    ctx: ServerContext, body: Prompting, sampling: Mapping[str, Any] = {}
) -> tuple[dict[str, Any], ToolUse]:
    """The conversation's fields of a GenerateReqInput, and its tools. A last assistant message is continued.
    sampling: the request's sampling parameters."""
    adapter = check_model(ctx, body.model)
    fields, variables = _thinking(ctx, body.thinking)
    tools, choice, parallel = tools_of(body.tools, body.tool_choice)
    messages = messages_of(body.system, body.messages)
    use = ToolUse.of(ctx.model, tools, choice, parallel, messages, sampling)
    if (effort := (body.output_config or {}).get("effort")) is not None:
        variables["reasoning_effort"] = effort
    prompt = {"messages": continued(messages), "tools": tools, "template_kwargs": variables or None}
    return {**fields, **prompt, "lora_path": adapter, "cache_salt": body.cache_salt}, use


def _thinking(ctx: ServerContext, thinking: dict[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of a GenerateReqInput for `thinking`, and variables of the chat template. Raises BadRequest,
    NotSupported."""
    if thinking is None:
        return {}, {}
    thinking = _without_empty(thinking)
    match thinking:
        case {"type": "enabled", "budget_tokens": int(budget)} if len(thinking) == 2 and budget is not True:
            check_range(budget, "thinking.budget_tokens", 1)
            if ctx.manager.reasoning is None:
                raise NotSupported(
                    "it is not known how this model marks its reasoning",
                    where="thinking",
                    hint="leave it out, or start the server with --reasoning-end TEXT",
                )
            return {"require_reasoning": True, "max_thinking_tokens": budget}, thinking_switch(ctx, True)
        case {"type": "disabled"} if len(thinking) == 1:
            return {}, thinking_switch(ctx, False)
        case {"type": str(kind)} if kind in _UP_TO_THE_MODEL:
            return {}, {}
        case _:
            raise BadRequest(
                'must be {"type": "enabled", "budget_tokens": N} or {"type": "disabled"}', where="thinking"
            )


def _format(config: dict[str, Any] | None, older: dict[str, Any] | None) -> dict[str, Any]:
    """The constraint of output_config or output_format, its older name, as sampling parameters. Raises
    BadRequest, NotSupported."""
    config = _without_empty(config or {})
    for name in config:
        if name not in ("effort", "format"):
            raise NotSupported(f"{name[:80]!r} is not supported", where="output_config")
    form = config.get("format")
    if form is not None and older is not None:
        raise BadRequest(
            "cannot be combined with output_config.format, which means the same", where="output_format"
        )
    match older if form is None else form:
        case None:
            return {}
        case {"type": "json_schema", "schema": {**schema}, **rest} if not _without_empty(rest):
            return {"json_schema": schema}
        case _:
            path = "output_config.format" if older is None else "output_format"
            raise BadRequest('must be {"type": "json_schema", "schema": {...}}', where=path)


def _without_empty(data: Mapping[Any, Any]) -> dict[str, Any]:
    """Without fields that are null or false."""
    return {str(name): value for name, value in data.items() if value is not None and value is not False}


class _Job:
    """One request, and how its reply becomes a message."""

    def __init__(self, ctx: ServerContext, body: MessagesRequest) -> None:
        self._ctx, self._body, self.streams = ctx, body, body.stream
        check_range(body.max_tokens, "max_tokens", 1)
        for name in ("container", "mcp_servers", "context_management", "diagnostics"):
            if getattr(body, name):
                raise NotSupported(f"{name} is not supported", where=name)
        sampling: dict[str, Any] = {**ctx.model.default_sampling, "max_new_tokens": body.max_tokens}
        values = {name: getattr(body, name) for name in ("temperature", "top_k", "top_p")}
        values["stop"] = body.stop_sequences or None
        sampling |= {name: value for name, value in values.items() if value is not None}
        sampling |= _format(body.output_config, body.output_format)
        budget = (body.thinking or {}).get("budget_tokens")
        if isinstance(budget, int) and budget >= body.max_tokens:
            raise BadRequest(
                f"must be less than max_tokens, {body.max_tokens}, got {budget}",
                where="thinking.budget_tokens",
            )
        prompt, self._tools = _prompt(ctx, body, sampling)
        sampling |= self._tools.sampling | shown_marks(ctx)
        request = GenerateReqInput(
            sampling_params=sampling,
            stream=body.stream,
            **{name: getattr(body, name) for name in _BOOTSTRAP},
            **prompt,
        )
        older = {} if body.output_format is None else {"json_schema": "output_format.schema"}
        self._generation = Generation(ctx, request, _NAMES | older, self._tools)
        [self._reply] = self._generation.replies
        self._thinks = request.require_reasoning is True
        self._id = f"msg_{new_rid()[:24]}"

    async def whole(self) -> MessageReply:
        reply = self._reply
        await self._generation.run()
        content = [] if reply.reasoning is None else [_thought(reply.reasoning)]
        if reply.content or (reply.reasoning is None and not reply.calls):
            content.append({"type": "text", "text": reply.content})
        for number, (name, arguments) in enumerate(reply.calls):
            content.append(_call(self._tools.new_id(number, name), name, _read(arguments)))
        return self._message(content, *self._stop())

    async def stream(self) -> AsyncGenerator[bytes, None]:
        reply, blocks = self._reply, _Blocks(self._tools)
        async with self._generation.follow() as changes:
            async for _ in changes:
                if reply.is_first:
                    head = self._message([], None, None)
                    head.usage.output_tokens = 0
                    yield event({"type": "message_start", "message": head}, "message_start")
                    if self._thinks or (self._tools.key is None and not reply.may_reason):
                        for data in blocks.kind("thinking" if self._thinks else "text"):
                            yield data
                    yield _named("ping")
                for one in reply.events:
                    for data in blocks.of(one):
                        yield data
        if reply.output is None:
            return
        for data in blocks.kind("text") if blocks.empty else ():
            yield data
        for data in blocks.end():
            yield data
        reason, sequence = self._stop()
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _named("message_delta", delta=delta, usage=self._usage())
        yield _named("message_stop")

    def _message(self, content: list[Any], reason: str | None, sequence: str | None) -> MessageReply:
        return MessageReply(self._id, self._ctx.served_name, content, reason, sequence, self._usage())

    def _stop(self) -> tuple[str, str | None]:
        match self._reply.meta.get("finish_reason"):
            case {"type": "length"}:
                return "max_tokens", None
            case {"matched": str(matched)} if matched in (self._body.stop_sequences or ()):
                return "stop_sequence", matched
            case _:
                called = self._reply.calls and not self._reply.was_cut
                return ("tool_use" if called else "end_turn"), None

    def _usage(self) -> Usage:
        meta = self._reply.meta
        prompt = int(meta.get("prompt_tokens") or 0)
        cached = int(meta.get("cached_tokens") or 0) if self._ctx.config.enable_cache_report else 0
        return Usage(prompt - cached, int(meta.get("completion_tokens") or 0), 0, cached)


class _Blocks:
    """The content blocks of a stream, one open at a time."""

    def __init__(self, tools: ToolUse) -> None:
        self._open, self._index, self._tools = "", -1, tools

    @property
    def empty(self) -> bool:
        return self._index < 0

    def of(self, one: ReplyEvent) -> list[bytes]:
        """The events of one event of the reply."""
        begun: list[bytes] = []
        match one:
            case ReasoningDelta(text=text):
                delta = {"type": "thinking_delta", "thinking": text}
                begun = self.kind("thinking") if text else []
            case ContentDelta(text=text):
                delta = {"type": "text_delta", "text": text}
                begun = self.kind("text") if text else []
            case ToolCallDelta(index=number, name=name, arguments=text):
                delta = {"type": "input_json_delta", "partial_json": text}
                if name is not None:
                    call = _call(self._tools.new_id(number, name), name, {})
                    begun = self._begin(f"call {number}", call)
        return [*begun, _named("content_block_delta", index=self._index, delta=delta)] if text else begun

    def kind(self, kind: str) -> list[bytes]:
        """Open a block of this kind, unless it is open."""
        if kind == self._open:
            return []
        return self._begin(kind, _thought("") if kind == "thinking" else {"type": "text", "text": ""})

    def _begin(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        events, self._open, self._index = self.end(), kind, self._index + 1
        return [*events, _named("content_block_start", index=self._index, content_block=block)]

    def end(self) -> list[bytes]:
        return [_named("content_block_stop", index=self._index)] if self._open else []


def _thought(text: str) -> dict[str, Any]:
    """Without a signature: thinking that clients send back is ignored."""
    return {"type": "thinking", "thinking": text, "signature": ""}


def _call(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": identity, "name": name, "input": arguments}


def _read(arguments: str) -> Any:
    """A call's arguments; those of a call that was cut off, as a text."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {"partial": arguments}


def _named(name: str, **facts: Any) -> bytes:
    return event({"type": name, **facts}, name)
