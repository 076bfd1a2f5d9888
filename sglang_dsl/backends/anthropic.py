"""Anthropic: the Messages API (docs.anthropic.com, "Messages" and "Streaming Messages"), over HTTP.

Nothing is dropped: what the API cannot express raises Unsupported. It knows no model's peculiarities.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.protocol.messages import Message
from sglang_dsl.backends.base import Call, Delta, Prompt
from sglang_dsl.backends.common.api import ApiBackend, ApiReply, ApiRequest
from sglang_dsl.backends.common.prompts import Part, arguments_of, parts_of, turns
from sglang_dsl.backends.common.remote import Shaped
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


class AnthropicReply(ApiReply):
    """A message, or the events of its stream (message_start, content_block_delta, message_stop, ...)."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._reason: str | None = None

    @staticmethod
    def samples(answer: Any, n: int) -> list[dict[str, Any]]:
        match answer:
            case {"content": list(), "stop_reason": str()}:
                return [answer]
            case _:
                raise BackendError(f"the API's answer is not a message: {str(answer)[:200]!r}")

    def event(self, data: dict[str, Any]) -> Delta:
        match data:
            case {"content": list(blocks), "stop_reason": str(reason)}:
                self._message, self._reason = data, reason
                self._usage |= data.get("usage") or {}
                text = "".join(b.get("text", "") for b in blocks if b.get("type") == "text")
                thinking = "".join(b.get("thinking", "") for b in blocks if b.get("type") == "thinking")
                return Delta(text, reasoning=thinking)
            case {"type": "message_start", "message": dict(message)}:
                self._message = message
                self._usage |= message.get("usage") or {}
            case {"type": "content_block_delta", "delta": {"type": "text_delta", "text": str(text)}}:
                return Delta(text)
            case {"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": str(text)}}:
                return Delta("", reasoning=text)
            case {"type": "message_delta", "delta": dict(delta)}:
                self._reason = delta.get("stop_reason") or self._reason
                self._usage |= data.get("usage") or {}
            case {"type": "message_stop"}:
                self.finished = self._reason is not None
            case {"type": "error", "error": dict(error)}:
                raise BackendError(
                    f"the stream ended with an error: {error.get('message')}",
                    retryable=error.get("type") in ("overloaded_error", "api_error"),
                )
            case _:
                pass  # pings, block borders, and what later versions of the API add
        return Delta("")

    def meta(self) -> dict[str, Any]:
        if self._reason == "refusal":
            raise BackendError("the model refused")
        kind = _FINISHES.get(str(self._reason), self._reason)
        meta: dict[str, Any] = {key: self._message[key] for key in ("id", "model") if self._message.get(key)}
        meta["finish_reason"] = {"type": kind, "reason": self._reason}
        cached = self._usage.get("cache_read_input_tokens") or 0
        written = self._usage.get("cache_creation_input_tokens") or 0
        meta["prompt_tokens"] = (self._usage.get("input_tokens") or 0) + cached + written
        meta["completion_tokens"] = self._usage.get("output_tokens") or 0
        meta["cached_tokens"] = cached
        calls = [
            {"id": block.get("id"), "name": block["name"], "arguments": json.dumps(block.get("input") or {})}
            for block in self._message.get("content") or ()
            if block.get("type") == "tool_use"
        ]
        return meta | ({"tool_calls": calls} if calls else {})


class Anthropic(ApiBackend):
    """The model `model_name` at Anthropic's API, or at a compatible server.

    api_key, base_url  None: ANTHROPIC_API_KEY and ANTHROPIC_BASE_URL from the environment
    max_retries        how often a request is sent again that was not started (no connection, 429, 503)

    json_schema, choices and the dtypes become structured output (output_config.format). token_usage counts
    what was charged.
    """

    name = "anthropic"
    reply = AnthropicReply
    prefills = True
    takes = TAKES
    samples = logprobs = False

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
        super().__init__(model_name)
        key = os.environ.get("ANTHROPIC_API_KEY", "") if api_key is None else api_key
        url = base_url or os.environ.get("ANTHROPIC_BASE_URL") or BASE_URL
        headers = {"anthropic-version": VERSION} | ({"x-api-key": key} if key else {})
        self._connect(url, headers, default_headers, timeout, max_retries)

    def request(self, call: Call, sampling: dict[str, Any], shaped: Shaped, *, stream: bool) -> ApiRequest:
        body: dict[str, Any] = {
            "model": self.model_name,
            "max_tokens": call.sampling.max_new_tokens,
            **sampling,
            **self._conversation(call.prompt),
            **_tools(call.prompt.tools, call.tool_choice, call.parallel_tools),
        }
        if shaped.form is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": shaped.form.schema}}
        if stream:
            body["stream"] = True
        return ApiRequest("/v1/messages", body)

    def _conversation(self, prompt: Prompt) -> dict[str, Any]:
        done, prefill = turns(prompt, self.name)
        system: list[str] = []
        sent: list[dict[str, Any]] = []
        for at, message in enumerate(done):
            if message.role in ("system", "developer"):
                if sent:
                    raise Unsupported(f"{self.name} supports system turns only before the first other turn")
                system.append(_text(message, self.name))
            elif message.role == "tool" and done[at - 1].role == "tool" and sent:
                # The results of one turn's calls go into one turn.
                sent[-1]["content"] += _wire(message, self.name)["content"]
            else:
                sent.append(_wire(message, self.name))
        if prefill is not None:
            sent.append(_wire(prefill, self.name))
        if not sent:
            raise Unsupported(f"{self.name} needs a user turn to reply to")
        body: dict[str, Any] = {"messages": sent}
        if system_prompt := "\n\n".join(text for text in system if text):
            body["system"] = system_prompt
        return body


def _tools(tools: Sequence[Mapping[str, Any]], choice: str, parallel: bool) -> dict[str, Any]:
    """Fields of a request that offer tools; none without any."""
    if not tools:
        return {}
    offered = []
    for function in (tool["function"] for tool in tools):
        about = {"description": function["description"]} if function.get("description") else {}
        offered.append({"name": function["name"], **about, "input_schema": function.get("parameters") or {}})
    kind: dict[str, Any] = {"type": {"required": "any"}.get(choice, choice)}
    if choice.startswith("="):
        kind = {"type": "tool", "name": choice[1:]}
    if not parallel and choice != "none":
        kind["disable_parallel_tool_use"] = True
    return {"tools": offered, "tool_choice": kind}


def _text(message: Message, backend: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if any(part.get("type") != "text" for part in message.content):
        raise Unsupported(f"{backend} supports only text in a turn of {message.role!r}")
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
        raise Unsupported(f"{backend} does not support turns of {message.role!r}")
    blocks = _blocks(message, backend)
    for call in message.tool_calls:
        arguments = arguments_of(call.arguments) or {}
        blocks.append({"type": "tool_use", "id": call.id or "", "name": call.name, "input": arguments})
    if len(blocks) == 1 and blocks[0]["type"] == "text":
        return {"role": message.role, "content": blocks[0]["text"]}
    return {"role": message.role, "content": blocks}


def _blocks(message: Message, backend: str) -> list[Part]:
    if not message.content:
        return []
    return parts_of(message, backend, lambda text: {"type": "text", "text": text}, _image)


def _image(url: str, mime: str, data: str | None) -> Part:
    if data is None:
        return {"type": "image", "source": {"type": "url", "url": url}}
    return {"type": "image", "source": {"type": "base64", "media_type": mime, "data": data}}
