"""POST /v1/chat/completions: OpenAI's chat completions, streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request

from runtime.formats.chat.render import conversation
from runtime.formats.reply import ContentDelta, ReasoningDelta, ReplyParser, ToolCallDelta
from runtime.protocol.errors import BadRequest, NotSupported
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.request_base import new_rid
from runtime.protocol.sampling import UNLIMITED
from runtime.server.context import RouteGroup, ServerContext, serves
from runtime.server.http.body import check_range
from runtime.server.http.ignored import refuse_unsupported
from runtime.server.http.sse import DONE, event
from runtime.server.openai import params
from runtime.server.openai.logprobs import token_entries
from runtime.server.openai.messages import messages_of, template_fields, tool_use
from runtime.server.replies import Generation, shown_marks
from runtime.server.tool_use import ToolUse


class ChatRequest(params.Generating):
    """OpenAI's fields, the extensions of Generating, and those of the chat template.

    max_completion_tokens overrides the older max_tokens; without both a reply may fill the context.
    input_ids: the prompt as ids, instead of messages and template. reasoning_effort is a variable of the
    template, like those of chat_template_kwargs. separate_reasoning: reasoning becomes reasoning_content;
    default: as the server's reasoning_parser. stream_reasoning: false = all of it in one piece.
    require_reasoning: the reply begins with reasoning, and a constraint applies to what follows it; default:
    with a constraint or max_thinking_tokens, if the template leaves the model's reasoning on.
    """

    messages: list[dict[str, Any]] | None = None
    input_ids: list[int] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None

    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool = True
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    allow_control_tokens: bool | None = None


class ChatMessage(msgspec.Struct):
    role: str
    content: str | None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(msgspec.Struct):
    """matched_stop: the stop string or id that ended the reply. hidden_states, prompt_token_ids: on
    request."""

    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    matched_stop: str | int | None = None
    hidden_states: list[list[float]] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """prompt_token_ids, prompt_logprobs: on request, as in vLLM."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: dict[str, Any] | None
    object: str = "chat.completion"
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType = msgspec.UNSET


_REFUSED = {
    "audio": "this model writes text only",
    "prediction": "predicted outputs are not used",
    "web_search_options": "there is no web search",
    "functions": "use tools",
    "function_call": "use tool_choice",
}
_CHAT = params.openai_operation("Chat completion", request=ChatRequest, response=ChatCompletion, stream=True)


class Chat(RouteGroup):
    @serves(_CHAT, "POST /v1/chat/completions")
    async def chat(self, request: Request) -> Any:
        job = await self._ctx.admit(request, ChatRequest, partial(ChatJob, self._ctx))
        return await self._ctx.reply(request, job)


def request_of(ctx: ServerContext, body: ChatRequest) -> tuple[GenerateReqInput, ToolUse, dict[str, str]]:
    """The runtime's request for a chat request, its tools, and the runtime's names of fields -> the body's.
    Raises BadRequest, NotSupported."""
    _check(ctx, body)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    fields, names = params.fields_of(ctx, body, UNLIMITED if limit is None else limit)
    fields.setdefault("require_reasoning", None)
    if body.logprobs:
        fields = params.with_logprobs(fields, body.top_logprobs or 0)
    if body.input_ids is not None:
        for name in ("chat_template_kwargs", "continue_final_message", "allow_control_tokens"):
            if getattr(body, name):
                raise BadRequest("needs messages, not input_ids", where=name)
        request = GenerateReqInput(input_ids=list(body.input_ids), stream=bool(body.stream), **fields)
        return request, ToolUse(), names
    history = messages_of(body.messages or [])
    sampling, parallel = fields["sampling_params"], body.parallel_tool_calls
    tools, use = tool_use(ctx.model, body.tools, body.tool_choice, parallel, history, sampling)
    sampling |= use.sampling | shown_marks(ctx, _kept_apart(body))
    fields |= tools | template_fields(body.chat_template_kwargs, body.reasoning_effort)
    if body.allow_control_tokens is not None:
        fields["allow_control_tokens"] = body.allow_control_tokens
    messages = conversation(
        history,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    request = GenerateReqInput(messages=messages, stream=bool(body.stream), **fields)
    return request, use, names


def _kept_apart(body: ChatRequest) -> bool | None:
    """separate_reasoning; reasoning that is to be dropped must be separated in any case."""
    return True if body.include_reasoning is False else body.separate_reasoning


def _check(ctx: ServerContext, body: ChatRequest) -> None:
    refuse_unsupported(body, _REFUSED)
    if body.modalities and body.modalities != ["text"]:
        raise NotSupported(
            'this model generates only text; leave it out or send ["text"]', where="modalities"
        )
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("needs logprobs: true", where="top_logprobs")
    check_range(body.top_logprobs, "top_logprobs", 0, params.MAX_TOP_LOGPROBS)


class ChatJob:
    """One request, and how its replies become choices."""

    def __init__(self, ctx: ServerContext, body: ChatRequest) -> None:
        self._ctx, self._body, self.streams = ctx, body, bool(body.stream)
        request, self._tools, names = request_of(ctx, body)
        apart, held = _kept_apart(body), body.stream_reasoning is False
        self._shows_reasoning = body.include_reasoning is not False
        self._shows_usage = body.streaming.continuous_usage_stats
        self._ids: dict[int, list[int]] = {}
        self._generation = Generation(
            ctx, request, names, self._tools, apart=apart, held=held, keep_aborted=True
        )
        self._replies = self._generation.replies
        self._id = f"chatcmpl-{body.named or new_rid()}"
        self._created = int(ctx.clock())
        self._head: dict[str, Any] = {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": ctx.served_name,
        }

    async def whole(self) -> ChatCompletion:
        await self._generation.run()
        choices = [self._choice(index, reply) for index, reply in enumerate(self._replies)]
        usage = params.usage_of(self._ctx, self._replies, 1)
        completion = ChatCompletion(self._id, self._created, self._ctx.served_name, choices, usage)
        first = self._replies[0]
        if self._body.return_token_ids:
            completion.prompt_token_ids = first.meta["prompt_token_ids"]
        completion.prompt_logprobs = params.prompt_logprobs_of(self._body, first)
        return completion

    def _choice(self, index: int, reply: ReplyParser) -> ChatChoice:
        reason, matched = self._finish(reply)
        content = reply.content or (None if reply.reasoning or reply.calls else "")
        thoughts = reply.reasoning if self._shows_reasoning else None
        message = ChatMessage("assistant", content, reasoning_content=thoughts)
        if reply.calls:
            message.tool_calls = [
                self._call(number, name, arguments) for number, (name, arguments) in enumerate(reply.calls)
            ]
        extras = params.extras_of(reply)
        if self._body.return_token_ids:
            extras["token_ids"] = params.new_ids_of(reply)
        return ChatChoice(index, message, self._logprobs(reply), reason, matched, **extras)

    def _finish(self, reply: ReplyParser) -> tuple[str | None, str | int | None]:
        reason, matched = params.finish_of(reply)
        called = reason == "stop" and reply.calls and not reply.was_cut
        return ("tool_calls" if called else reason), matched

    def _call(self, number: int, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": self._tools.new_id(number, name), "type": "function", "function": function}

    async def stream(self) -> AsyncGenerator[bytes, None]:
        async with self._generation.follow() as changes:
            async for index, reply in changes:
                ids = self._body.return_token_ids
                if reply.is_first:
                    head = {"prompt_token_ids": reply.meta["prompt_token_ids"]} if ids else {}
                    yield self._chunk(index, {"role": "assistant", "content": ""}, head)
                if ids:
                    self._ids.setdefault(index, []).extend(params.new_ids_of(reply))
                for one in reply.events:
                    match one:
                        case ReasoningDelta() if not self._shows_reasoning:
                            pass
                        case ReasoningDelta(text=text):
                            yield self._chunk(index, {"reasoning_content": text})
                        case ContentDelta(text=text):
                            for chunk in self._content_chunks(index, reply, text):
                                yield chunk
                        case ToolCallDelta(index=number, name=None, arguments=arguments):
                            call = {"index": number, "function": {"arguments": arguments}}
                            yield self._chunk(index, {"tool_calls": [call]})
                        case ToolCallDelta(index=number, name=str(name), arguments=arguments):
                            call = {"index": number, **self._call(number, name, arguments)}
                            yield self._chunk(index, {"tool_calls": [call]})
                reason, matched = self._finish(reply)
                if reason is not None:
                    facts = {"finish_reason": reason, "matched_stop": matched, **params.extras_of(reply)}
                    yield self._chunk(index, {}, **facts)
        if self._body.streaming.include_usage:
            yield event({**self._head, "choices": [], "usage": params.usage_of(self._ctx, self._replies, 1)})
        yield DONE

    def _content_chunks(self, index: int, reply: ReplyParser, text: str) -> Iterator[bytes]:
        """One; two if the token that ends the reply, which has no text, comes with the end of its text:
        clients such as guidance read the text from a chunk's tokens."""
        logprobs = self._logprobs(reply)
        if logprobs is not None and text and isinstance(self._finish(reply)[1], int):
            *tokens, last = logprobs["content"] or [None]
            if tokens and not text.endswith(last["token"]):
                yield self._chunk(index, {"content": text}, logprobs={**logprobs, "content": tokens})
                text, logprobs = "", {**logprobs, "content": [last]}
        yield self._chunk(index, {"content": text}, logprobs=logprobs)

    def _logprobs(self, reply: ReplyParser) -> dict[str, Any] | None:
        """Of the tokens of the reply's last delta."""
        if not self._body.logprobs or reply.output is None:
            return None
        content = token_entries(
            reply.output,
            self._ctx.manager.tokenizer.vocabulary,
            self._body.top_logprobs or 0,
            as_ids=bool(self._body.return_tokens_as_token_ids),
        )
        return {"content": content, "refusal": None}

    def _chunk(
        self, index: int, delta: Mapping[str, Any], head: Mapping[str, Any] = {}, **facts: Any
    ) -> bytes:
        """head: fields beside the choice; facts: those of the choice."""
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **facts}
        if self._body.return_token_ids:  # all since the last chunk; some tokens' text is held back
            choice["token_ids"] = self._ids.pop(index, [])
        usage = params.usage_of(self._ctx, self._replies, 1) if self._shows_usage else None
        return event({**self._head, **head, "choices": [choice], "usage": usage})
