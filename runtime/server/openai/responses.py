"""/v1/responses: OpenAI's Responses interface: create (whole, streamed, or in the background), look up,
cancel, delete.

Responses are kept in this process's memory, the newest MAX_KEPT of them; with several HTTP workers each knows
its own only. It knows items and events; prompts, templates and tokens are the frontend's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.formats.chat.render import conversation
from runtime.formats.reply import ContentDelta, ReasoningDelta, ReplyEvent, ToolCallDelta
from runtime.protocol.base_req import new_rid
from runtime.protocol.errors import BadRequest, InternalFault, RuntimeFault
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message
from runtime.protocol.sampling import ROOM
from runtime.server.context import ServerContext
from runtime.server.http.body import read_struct
from runtime.server.http.errors import NotFound, NotSupported, error_type, json_response
from runtime.server.http.openapi import Operation
from runtime.server.http.sse import closing_stream, event
from runtime.server.openai.logprobs import token_entries
from runtime.server.openai.messages import callable_tools, tools_of
from runtime.server.openai.params import check_model, says_something
from runtime.server.openai.responses_input import messages_of, tools_for_chat
from runtime.server.openai.responses_items import (
    call_item,
    calls_of,
    message_item,
    reasoning_item,
    text_of,
    text_part,
)
from runtime.server.output_format import ANY_JSON, ANY_OBJECT
from runtime.server.replies import follow, parsers, ready, run, shown_marks
from runtime.server.tool_use import ToolUse

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


_ID = {"response_id": {"type": "string"}}
OPENAPI = {
    "POST /v1/responses": Operation(
        "reply to items (OpenAI's Responses)",
        request=ResponsesRequest,
        response=ResponseObject,
        stream=True,
        errors=(404, 501, 504),
        tag="openai",
    ),
    "GET /v1/responses/{response_id}": Operation(
        "a response that was kept", response=ResponseObject, path=_ID, tag="openai"
    ),
    "DELETE /v1/responses/{response_id}": Operation(
        "forget a response", response=Deleted, path=_ID, tag="openai"
    ),
    "POST /v1/responses/{response_id}/cancel": Operation(
        "cancel a response in the background", response=ResponseObject, errors=(400,), path=_ID, tag="openai"
    ),
}

_REFUSED = {
    "conversation": "use previous_response_id, or send the items",
    "prompt": "stored prompts are not kept here",
    "max_tool_calls": "no tools are run here",
    "moderation": "there is no moderation",
    "context_management": "nothing is left out of a conversation",
}
_INCLUDED = {"message.output_text.logprobs", "reasoning.encrypted_content"}
"""The second changes nothing: clients that store nothing here ask for it, and reasoning comes as text."""
_NAMES = {
    "max_new_tokens": "max_output_tokens", "messages": "input", "json_schema": "text.format.schema",
    "structural_tag": "text.format",
}  # fmt: skip
"""What the runtime's fields are called here, where they have another name."""


@dataclass
class _Kept:
    """A response, the conversation that led to it, and the task that works on it."""

    response: ResponseObject
    messages: list[Message]
    task: asyncio.Task[None] | None = None


@dataclass
class Store:
    """The newest responses by id."""

    limit: int = MAX_KEPT
    kept: OrderedDict[str, _Kept] = field(default_factory=OrderedDict)

    def put(self, kept: _Kept) -> None:
        self.kept[kept.response.id] = kept
        while len(self.kept) > self.limit:
            _, oldest = self.kept.popitem(last=False)
            if oldest.task is not None:
                oldest.task.cancel()

    def get(self, identity: str, where: str = "response_id") -> _Kept:
        found = self.kept.get(identity)
        if found is None:
            raise NotFound(f"no response {identity[:80]!r} is kept", where=where)
        return found


def routes(ctx: ServerContext) -> list[Route]:
    made = _Routes(ctx)
    return [
        Route("/v1/responses", made.create, methods=["POST"]),
        Route("/v1/responses/{response_id}", made.read, methods=["GET"]),
        Route("/v1/responses/{response_id}", made.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/cancel", made.cancel, methods=["POST"]),
    ]


class _Routes:
    def __init__(self, ctx: ServerContext) -> None:
        self._ctx, self._store = ctx, Store()

    async def create(self, request: Request) -> Response:
        body = await read_struct(request, self._ctx.config, ResponsesRequest)
        job = _Job(self._ctx, body, self._store)
        if body.background:
            return json_response(job.begin())
        if body.stream:
            return self._ctx.event_stream(job.stream(), job.failed_event)
        return json_response(await self._ctx.while_connected(request, job.whole()))

    async def read(self, request: Request) -> Response:
        kept = self._store.get(request.path_params["response_id"])
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise NotSupported("a kept response is not streamed", where="stream", hint="ask without stream")
        return json_response(kept.response)

    async def delete(self, request: Request) -> Response:
        identity = request.path_params["response_id"]
        kept = self._store.get(identity)
        if kept.task is not None:
            kept.task.cancel()
        del self._store.kept[identity]
        return json_response(Deleted(identity))

    async def cancel(self, request: Request) -> Response:
        kept = self._store.get(request.path_params["response_id"])
        if not kept.response.background:
            raise BadRequest("only a response in the background can be cancelled", where="response_id")
        if kept.task is not None and not kept.task.done():
            kept.task.cancel()
            await asyncio.wait({kept.task}, timeout=self._ctx.config.control_timeout_s)
            if kept.response.status == "queued":
                kept.response.status = "cancelled"  # before its work had begun
        return json_response(kept.response)


class _Job:
    """One request on its way to a response."""

    def __init__(self, ctx: ServerContext, body: ResponsesRequest, store: Store) -> None:
        self._ctx, self._body, self._store = ctx, body, store
        check_model(ctx, body.model)
        self._check()
        messages: list[Message] = []
        if body.previous_response_id is not None:
            earlier = store.get(body.previous_response_id, "previous_response_id")
            if earlier.response.status not in ("completed", "incomplete"):
                raise BadRequest(f"is {earlier.response.status}", where="previous_response_id")
            # Instructions are not carried over; the new ones, if any, come first.
            messages = [one for one in earlier.messages if one.role != "system"]
            said = earlier.response.output
            messages.append(Message("assistant", text_of(said), tool_calls=calls_of(said)))
        instructed = [Message("system", body.instructions)] if body.instructions else []
        self._messages = [*instructed, *messages, *messages_of(body.input)]
        self._request = self._generation()
        [self.reply] = parsers(ctx, self._request, self._tools)
        self.calls: list[dict[str, Any]] = []
        self._logprobs: list[dict[str, Any]] = []
        self.response = self._blank()
        self.message_id, self.thought_id = f"msg_{new_rid()}", f"rs_{new_rid()}"
        self._sequence = 0

    def _check(self) -> None:
        body = self._body
        for name, why in _REFUSED.items():
            if says_something(getattr(body, name)):
                raise NotSupported(f"{name} is not supported: {why}", where=name)
        if body.background and body.stream:
            raise NotSupported("a response in the background is not streamed", where="background")
        if body.background and body.store is False:
            raise BadRequest("a response in the background must be stored", where="store")
        if body.truncation == "auto":
            raise NotSupported("nothing is left out of a conversation", where="truncation")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
            raise BadRequest(
                f"must be from 0 to {MAX_TOP_LOGPROBS}, got {body.top_logprobs}", where="top_logprobs"
            )
        unknown = set(body.include or ()) - _INCLUDED
        if unknown:
            raise NotSupported(f"{', '.join(sorted(unknown))} cannot be included", where="include")

    def _generation(self) -> GenerateReqInput:
        body, model = self._body, self._ctx.model
        sampling: dict[str, Any] = {**model.default_sampling}
        limit = body.max_output_tokens
        if limit is not None and limit < 1:
            raise BadRequest(f"must be at least 1, got {limit}", where="max_output_tokens")
        sampling["max_new_tokens"] = ROOM if limit is None else limit
        for name in ("temperature", "top_p", "top_k", "min_p", "seed"):
            if (value := getattr(body, name)) is not None:
                sampling[name] = value
        sampling |= _constraint(body.text.format if body.text is not None else None)
        fields: dict[str, Any] = {}
        tools = tools_of(tools_for_chat(body.tools), body.tool_choice)
        if tools:
            fields["tools"] = tools
        allowed, choice = callable_tools(tools, body.tool_choice)
        self._tools = ToolUse.of(model, allowed, choice, body.parallel_tool_calls, self._messages, sampling)
        sampling |= self._tools.sampling | shown_marks(self._ctx)
        if body.top_logprobs or "message.output_text.logprobs" in (body.include or ()):
            fields |= {"return_logprob": True, "return_text_in_logprobs": True}
            fields["top_logprobs_num"] = body.top_logprobs or 0
        effort = (body.reasoning or {}).get("effort")
        if effort is not None:
            fields["template_kwargs"] = {"reasoning_effort": effort}
        made = GenerateReqInput(
            require_reasoning=None,
            messages=conversation(self._messages),
            stream=bool(body.stream),
            sampling_params=sampling,
            **fields,
        )
        return ready(self._ctx, made, _NAMES)

    def _blank(self) -> ResponseObject:
        body = self._body
        form = body.text.format if body.text is not None and body.text.format is not None else TextFormat()
        asked = {name: value for name, value in msgspec.to_builtins(form).items() if value is not None}
        reasoning = {"effort": None, "summary": None, **(body.reasoning or {})}
        return ResponseObject(
            id=f"resp_{new_rid()}",
            created_at=int(self._ctx.clock()),
            model=self._ctx.served_name,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=reasoning,
            background=bool(body.background),
            store=body.store is not False,
            temperature=body.temperature,
            text={"format": asked},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=body.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
        )

    # -- whole -----------------------------------------------------------------------------------------------

    async def whole(self) -> ResponseObject:
        await self._run()
        self._keep(None)
        return self.response

    def begin(self) -> ResponseObject:
        """Go on in the background; what is answered at once."""
        self.response.status = "queued"
        self._keep(None)
        self._store.get(self.response.id).task = asyncio.create_task(self._work(), name="sglang-dsl-response")
        return msgspec.structs.replace(self.response)

    async def _work(self) -> None:
        self.response.status = "in_progress"
        try:
            await self._run()
        except asyncio.CancelledError:
            self.response.status = "cancelled"
            raise
        except RuntimeFault as fault:
            self._fail(fault)
        except Exception as error:  # noqa: BLE001 - sent to whoever reads the response
            self._fail(InternalFault(f"{type(error).__name__}: {error}", hint="a defect of the runtime"))

    def _fail(self, fault: RuntimeFault) -> None:
        self.response.status = "failed"
        self.response.error = {"code": error_type(fault.status), "message": str(fault)}

    def _keep(self, task: asyncio.Task[None] | None) -> None:
        if self.response.store:
            self._store.put(_Kept(self.response, self._messages, task))

    async def _run(self) -> None:
        await run(self._ctx, self._request, _NAMES, [self.reply])
        self.new_logprobs()
        self._finish()

    def _finish(self) -> None:
        reply, meta = self.reply, self.reply.meta
        cut = (meta.get("finish_reason") or {}).get("type") == "length"
        self.response.status = "incomplete" if cut else "completed"
        self.response.output = []
        if reply.content or not reply.calls:
            self.response.output.append(self.item(reply.content, self.response.status, self._logprobs))
        for number, (name, arguments) in enumerate(reply.calls):
            if number == len(self.calls):
                self.call(number, name)
            self.calls[number] |= {"arguments": arguments, "status": self.response.status}
        self.response.output += self.calls
        if reply.reasoning is not None:
            self.response.output.insert(0, self.thought(reply.reasoning, self.response.status))
        if cut:
            self.response.incomplete_details = {"reason": "max_output_tokens"}
        prompt, made = (int(meta.get(name) or 0) for name in ("prompt_tokens", "completion_tokens"))
        cached = int(meta.get("cached_tokens") or 0) if self._ctx.config.enable_cache_report else 0
        self.response.usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": int(meta.get("reasoning_tokens") or 0)},
            "total_tokens": prompt + made,
        }

    def thought(self, text: str, status: str) -> dict[str, Any]:
        return reasoning_item(self.thought_id, text, status)

    @property
    def may_call(self) -> bool:
        return self._tools.key is not None

    def call(self, number: int, name: str) -> dict[str, Any]:
        """The item of a call that begins."""
        item = call_item(f"fc_{new_rid()}", self._tools.new_id(number, name), name, "", "in_progress")
        self.calls.append(item)
        return item

    def item(self, text: str, status: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
        return message_item(self.message_id, text, status, logprobs)

    # -- streamed --------------------------------------------------------------------------------------------

    async def stream(self) -> AsyncGenerator[bytes, None]:
        reply, items = self.reply, _Items(self)
        async with closing_stream(follow(self._ctx, self._request, _NAMES, [reply])) as changes:
            async for _ in changes:
                if reply.is_first:
                    yield self.event("response.created", response=self.response)
                    yield self.event("response.in_progress", response=self.response)
                    for made in items.begin():
                        yield made
                for one in reply.events:
                    for made in items.of(one):
                        yield made
        if reply.output is None:
            return
        self._finish()
        self.response.output.sort(key=items.place)
        self._keep(None)
        for made in items.end():
            yield made
        yield self.event(f"response.{self.response.status}", response=self.response)

    def failed_event(self, fault: RuntimeFault) -> bytes:
        """How an error in the middle of the stream is sent."""
        self._fail(fault)
        self._keep(None)
        return self.event("response.failed", response=self.response)

    def new_logprobs(self) -> list[dict[str, Any]]:
        """Of the tokens of the last delta, which are added to all."""
        assert self.reply.output is not None
        new = token_entries(self.reply.output, self._ctx.manager.tokenizer.vocabulary)
        self._logprobs += new
        return new

    def event(self, kind: str, **facts: Any) -> bytes:
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": kind, "sequence_number": number, **facts}, kind)


class _Items:
    """The items of a streamed output, in their order: reasoning, message, calls."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._places: dict[str, int] = {}  # item -> output_index

    def begin(self) -> list[bytes]:
        """What is known to come: a reply that may call need not say anything."""
        job, made = self._job, []
        if job.reply.reasoning is not None:
            made += self._thought()
        return made if job.may_call or job.reply.may_reason else made + self._message()

    def _thought(self) -> list[bytes]:
        if "reasoning" in self._places:
            return []
        return self._open("reasoning", {**self._job.thought("", "in_progress"), "content": []})

    def place(self, item: dict[str, Any]) -> int:
        """Where an item of the finished response stands."""
        kind = item["type"]
        if kind == "function_call":
            kind = f"call {next(at for at, one in enumerate(self._job.calls) if one is item)}"
        return self._places.get(kind, len(self._places))

    def _open(self, kind: str, item: dict[str, Any]) -> list[bytes]:
        place = self._places[kind] = len(self._places)
        return [self._job.event("response.output_item.added", output_index=place, item=item)]

    def _message(self) -> list[bytes]:
        if "message" in self._places:
            return []
        made = self._open("message", {**self._job.item("", "in_progress"), "content": []})
        part = text_part("", ())
        return [*made, self._job.event("response.content_part.added", **self._at("message"), part=part)]

    def _at(self, kind: str) -> dict[str, Any]:
        identity = self._job.message_id if kind == "message" else self._job.thought_id
        return {"output_index": self._places[kind], "item_id": identity, "content_index": 0}

    def of(self, one: ReplyEvent) -> list[bytes]:
        job = self._job
        match one:
            case ReasoningDelta(text=text):
                begun = self._thought()
                delta = job.event("response.reasoning_text.delta", **self._at("reasoning"), delta=text)
                return [*begun, delta]
            case ContentDelta(text=text):
                new = job.new_logprobs()
                if not text and (job.may_call or job.reply.may_reason):
                    return []
                begun = self._message()
                told = {**self._at("message"), "delta": text, "logprobs": new}
                return [*begun, job.event("response.output_text.delta", **told)]
            case ToolCallDelta(index=number, name=name, arguments=text):
                begun = [] if name is None else self._open(f"call {number}", job.call(number, name))
                if not text:
                    return begun
                place = {"output_index": self._places[f"call {number}"], "item_id": job.calls[number]["id"]}
                return [*begun, job.event("response.function_call_arguments.delta", **place, delta=text)]
        raise TypeError(f"no event of a reply: {one!r}")

    def end(self) -> list[bytes]:
        """Each item as it is in the end."""
        job, made = self._job, []
        if not job.calls:
            made += self._message()
        for kind, place in self._places.items():
            item = self._final(kind)
            match item["type"]:
                case "reasoning":
                    text = job.reply.reasoning or ""
                    made.append(job.event("response.reasoning_text.done", **self._at(kind), text=text))
                case "message":
                    [part] = item["content"]
                    told = {"text": part["text"], "logprobs": part["logprobs"]}
                    made.append(job.event("response.output_text.done", **self._at(kind), **told))
                    made.append(job.event("response.content_part.done", **self._at(kind), part=part))
                case _:
                    told = {"item_id": item["id"], "arguments": item["arguments"], "name": item["name"]}
                    name = "response.function_call_arguments.done"
                    made.append(job.event(name, output_index=place, **told))
            made.append(job.event("response.output_item.done", output_index=place, item=item))
        return made

    def _final(self, kind: str) -> dict[str, Any]:
        if kind.startswith("call "):
            return self._job.calls[int(kind[5:])]
        return next(item for item in self._job.response.output if item["type"] == kind)


def _constraint(form: TextFormat | None) -> dict[str, Any]:
    """The sampling word of a text format. Raises BadRequest."""
    if form is None:
        return {}
    own = {"json_schema": ("schema",), "structural_tag": ("structures", "triggers", "format")}.get(
        form.type, ()
    )
    for name in ("schema", "structures", "triggers", "format"):
        if getattr(form, name) is not None and name not in own:
            raise BadRequest(f"does not go with type {form.type!r}", where=f"text.format.{name}")
    match form.type:
        case "text":
            return {}
        case "json_object":
            return {"json_schema": ANY_OBJECT}
        case "json_schema":
            return {"json_schema": ANY_JSON if form.schema is None else form.schema}
        case "structural_tag":
            facts = {name: value for name in own if (value := getattr(form, name)) is not None}
            return {"structural_tag": {"type": "structural_tag", **facts}}
