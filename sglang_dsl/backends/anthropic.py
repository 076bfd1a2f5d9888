"""Anthropic: the Messages API (docs.anthropic.com, "Messages" and "Streaming Messages"), over HTTP.

System turns are sent as the system prompt in every request, wherever they are before the first user turn.
Nothing is dropped: what the API cannot express raises Unsupported. It knows no model's peculiarities.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from runtime.protocol.messages import Message
from sglang_dsl.backends.base import Backend, Call, ChoiceCall, ChoiceScores, Completion, Delta, Prompt
from sglang_dsl.backends.common.chat_choices import ChatChoices, options_schema
from sglang_dsl.backends.common.prompts import arguments, faults, image_of, turns
from sglang_dsl.backends.common.remote import Shaped, form_for, spoken
from sglang_dsl.backends.common.transport import Limits, Transport
from sglang_dsl.conversation.usage import TokenUsage
from sglang_dsl.errors import BackendError, Unsupported

BASE_URL = "https://api.anthropic.com"
VERSION = "2023-06-01"
TAKES = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "stop": "stop_sequences"}
_FINISHES = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}


class Anthropic(Backend):
    """The model `model_name` at Anthropic's API, or at a compatible server.

    api_key, base_url  None: ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL from the environment
    max_retries        how often a request is sent again that was not started (no connection, 429, 503)

    json_schema, choices and the dtypes become structured output (output_config.format). token_usage counts
    what was charged.
    """

    name = "anthropic"
    speculates = prefills = calls_tools = True

    def __init__(
        self,
        model_name: str,
        *,
        api_key: str | None = None,
        base_url: str | None = None,
        default_headers: Mapping[str, str] | None = None,
        timeout: float = 600.0,
        max_retries: int = 3,
    ) -> None:
        self.model_name = model_name
        self.token_usage = TokenUsage()
        self._choices = ChatChoices(self.name)
        key = os.environ.get("ANTHROPIC_API_KEY", "") if api_key is None else api_key
        url = base_url or os.environ.get("ANTHROPIC_BASE_URL") or BASE_URL
        headers = {"anthropic-version": VERSION} | ({"x-api-key": key} if key else {})
        self._transport = Transport(
            url.rstrip("/"),
            headers | dict(default_headers or {}),
            limits=Limits(read_s=timeout, retries=max_retries),
            name=self.name,
        )

    def __repr__(self) -> str:
        return f"Anthropic({self.model_name!r})"

    def get_model_name(self) -> str:
        """The model's name, as it was given."""
        return self.model_name

    @property
    def identity(self) -> str:
        return f"{self.name}:{self.model_name}"

    # -- the verbs -------------------------------------------------------------------------------------------

    async def generate(self, call: Call) -> Completion:
        body, shaped = self._request(call)
        text, meta = await self._reply(body, call.timeout)
        return shaped.completion([text], [meta])

    async def stream(self, call: Call) -> AsyncIterator[Delta]:
        if call.prompt.tools and call.tool_choice != "none":
            async for delta in self.whole(call):
                yield delta
            return
        body, shaped = self._request(call)
        body["stream"] = True
        growing = _Growing()
        with faults(self.name):
            events = self._transport.events("/v1/messages", json.dumps(body).encode(), call.timeout)
            async with aclosing(events):  # type: ignore[type-var]
                async for event in events:
                    delta = growing.take(event)
                    piece = shaped.piece(delta.text)
                    if piece or delta.reasoning:
                        yield Delta(piece, reasoning=delta.reasoning)
        meta = growing.last()
        self._charge(meta)
        yield shaped.last(meta)

    async def score(self, call: ChoiceCall) -> ChoiceScores:
        """One reply constrained to the options. The other options are not scored, which the metadata
        reports."""

        async def ask(room: int, words: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            # The API takes no seed.
            body = {
                "model": self.model_name,
                "max_tokens": room,
                **{word: value for word, value in words.items() if word in TAKES},
                "output_config": _json_schema(options_schema(call.choices)),
                **self._conversation(call.prompt),
                **_tools(call.prompt.tools),
            }
            return await self._reply(body, call.timeout)

        return await self._choices.scores(call, ask)

    async def aclose(self) -> None:
        await self._transport.aclose()

    # -- requests --------------------------------------------------------------------------------------------

    def _request(self, call: Call) -> tuple[dict[str, Any], Shaped]:
        unable = [
            ("n above 1", call.n > 1),
            ("return_logprob", call.return_logprob),
            *((word, True) for word in sorted(call.options)),
        ]
        if refused := [word for word, asked in unable if asked]:
            raise Unsupported(f"{self.name} does not take {', '.join(refused)}", backend=self.name)
        body: dict[str, Any] = {
            "model": self.model_name,
            "max_tokens": call.sampling.max_new_tokens,
            **spoken(call.sampling, TAKES, self.name),
            **self._conversation(call.prompt),
            **_tools(call.prompt.tools, call.tool_choice, call.parallel_tools),
        }
        form = form_for(call, self.name)
        if form is not None:
            body["output_config"] = _json_schema(form.schema)
        return body, Shaped(call, form, body, TAKES["stop"])

    def _conversation(self, prompt: Prompt) -> dict[str, Any]:
        done, prefill = turns(prompt, self.name)
        system: list[str] = []
        sent: list[dict[str, Any]] = []
        for at, message in enumerate(done):
            if message.role in ("system", "developer"):
                if sent:
                    raise Unsupported(
                        f"{self.name} supports system turns only before the first other turn",
                        backend=self.name,
                    )
                system.append(_text(message, self.name))
            elif message.role == "tool" and done[at - 1].role == "tool" and sent:
                # The results of one turn's calls go into one turn.
                sent[-1]["content"] += _wire(message, self.name)["content"]
            else:
                sent.append(_wire(message, self.name))
        if prefill is not None:
            sent.append(_wire(prefill, self.name))
        if not sent:
            raise Unsupported(f"{self.name} needs a user turn to reply to", backend=self.name)
        body: dict[str, Any] = {"messages": sent}
        if said := "\n\n".join(text for text in system if text):
            body["system"] = said
        return body

    async def _reply(self, body: dict[str, Any], timeout: float | None) -> tuple[str, dict[str, Any]]:
        with faults(self.name):
            data = json.dumps(body).encode()
            return self._whole(await self._transport.post("/v1/messages", data, timeout))

    # -- replies ---------------------------------------------------------------------------------------------

    def _whole(self, answer: Any) -> tuple[str, dict[str, Any]]:
        match answer:
            case {"content": list(blocks), "stop_reason": str(reason)}:
                text = "".join(block.get("text", "") for block in blocks if block.get("type") == "text")
                thought = "".join(b.get("thinking", "") for b in blocks if b.get("type") == "thinking")
                meta = _meta(answer, reason, answer.get("usage") or {})
                calls = [
                    {"id": b.get("id"), "name": b["name"], "arguments": json.dumps(b.get("input") or {})}
                    for b in blocks
                    if b.get("type") == "tool_use"
                ]
            case _:
                raise BackendError(
                    f"the API's answer is not a message: {str(answer)[:200]!r}", backend=self.name
                )
        if thought:
            meta["reasoning_content"] = thought
        if calls:
            meta["tool_calls"] = calls
        self._charge(meta)
        return text, meta

    def _charge(self, meta: Mapping[str, Any]) -> None:
        self.token_usage.add(meta.get("prompt_tokens") or 0, meta.get("completion_tokens") or 0)


def _tools(tools: Sequence[Mapping[str, Any]], choice: str = "none", parallel: bool = True) -> dict[str, Any]:
    """Fields of a request that offer tools; none without any."""
    if not tools:
        return {}
    said = []
    for function in (tool["function"] for tool in tools):
        about = {"description": function["description"]} if function.get("description") else {}
        said.append({"name": function["name"], **about, "input_schema": function.get("parameters") or {}})
    kind: dict[str, Any] = {"type": {"required": "any"}.get(choice, choice)}
    if choice.startswith("="):
        kind = {"type": "tool", "name": choice[1:]}
    if not parallel and choice != "none":
        kind["disable_parallel_tool_use"] = True
    return {"tools": said, "tool_choice": kind}


def _json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"format": {"type": "json_schema", "schema": schema}}


class _Growing:
    """A stream of events: message_start, content_block_delta, message_delta, message_stop, ping, error."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._reason: str | None = None
        self._thought: list[str] = []
        self._ended = False
        self._length = 0

    def take(self, event: str) -> Delta:
        try:
            data = json.loads(event)
        except ValueError as error:
            raise BackendError(f"an event of the stream is not JSON: {event[:200]!r}") from error
        match data:
            case {"type": "message_start", "message": dict(message)}:
                self._message = message
                self._usage |= message.get("usage") or {}
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": str(text)}}:
                self._length += len(text)
                return Delta(text)
            case {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": str(text)}}:
                self._thought.append(text)
                return Delta("", reasoning=text)
            case {"type": "message_delta", "delta": dict(delta)}:
                self._reason = delta.get("stop_reason") or self._reason
                self._usage |= data.get("usage") or {}
            case {"type": "message_stop"}:
                self._ended = True
            case {"type": "error", "error": dict(told)}:
                raise BackendError(
                    f"the stream ended with an error: {told.get('message')}",
                    backend=Anthropic.name,
                    retryable=told.get("type") in ("overloaded_error", "api_error"),
                )
            case _:
                pass  # pings, block borders, and what later versions of the API add
        return Delta("")

    def last(self) -> dict[str, Any]:
        if not self._ended or self._reason is None:
            raise BackendError(
                f"the stream broke off after {self._length} characters",
                backend=Anthropic.name,
                retryable=True,
                hint="the connection or the server failed; the text so far is incomplete",
            )
        meta = _meta(self._message, self._reason, self._usage)
        return meta | ({"reasoning_content": "".join(self._thought)} if self._thought else {})


def _meta(message: Mapping[str, Any], reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
    if reason == "refusal":
        raise BackendError("the model refused", backend=Anthropic.name)
    kind = _FINISHES.get(reason, reason)
    meta: dict[str, Any] = {key: message[key] for key in ("id", "model") if message.get(key)}
    meta["finish_reason"] = {"type": kind, "reason": reason}
    cached = usage.get("cache_read_input_tokens") or 0
    written = usage.get("cache_creation_input_tokens") or 0
    meta["prompt_tokens"] = (usage.get("input_tokens") or 0) + cached + written
    meta["completion_tokens"] = usage.get("output_tokens") or 0
    meta["cached_tokens"] = cached
    return meta


def _text(message: Message, backend: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if any(part.get("type") != "text" for part in message.content):
        raise Unsupported(f"{backend} supports only text in a turn of {message.role!r}", backend=backend)
    return "".join(part["text"] for part in message.content)


def _wire(message: Message, backend: str) -> dict[str, Any]:
    if message.role == "tool":
        result = {
            "type": "tool_result",
            "tool_use_id": message.tool_call_id or "",
            "content": _text(message, backend),
        }
        return {"role": "user", "content": [result]}
    if message.role not in ("user", "assistant"):
        raise Unsupported(f"{backend} does not support turns of {message.role!r}", backend=backend)
    blocks = _blocks(message, backend)
    for call in message.tool_calls:
        blocks.append({"type": "tool_use", "id": call.id or "", "name": call.name, "input": arguments(call)})
    if len(blocks) == 1 and blocks[0]["type"] == "text":
        return {"role": message.role, "content": blocks[0]["text"]}
    return {"role": message.role, "content": blocks}


def _blocks(message: Message, backend: str) -> list[dict[str, Any]]:
    if isinstance(message.content, str):
        return [{"type": "text", "text": message.content}] if message.content else []
    blocks: list[dict[str, Any]] = []
    for part in message.content:
        match part:
            case {"type": "text", "text": str(text)}:
                blocks.append({"type": "text", "text": text})
            case {"type": "image_url"}:
                image = image_of(part)
                source = (
                    {"type": "url", "url": image.url}
                    if image.data is None
                    else {"type": "base64", "media_type": image.mime, "data": image.data}
                )
                blocks.append({"type": "image", "source": source})
            case _:
                raise Unsupported(
                    f"{backend} supports text and images, not {part.get('type')!r}", backend=backend
                )
    return blocks
