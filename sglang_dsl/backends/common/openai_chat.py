"""OpenAI's wire format: messages, tools and schemas of chat completions, and replies of both APIs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.protocol.messages import Message
from sglang_dsl.backends.base import Call, Delta, Prompt
from sglang_dsl.backends.common.api import ApiReply
from sglang_dsl.backends.common.prompts import turns
from sglang_dsl.backends.common.remote import JsonForm, is_strict
from sglang_dsl.errors import BackendError, Unsupported

_FINISHES = {"stop": "stop", "length": "length", "tool_calls": "stop", "function_call": "stop"}

STREAMED: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
"""Fields of a request whose reply is streamed."""


def chat_messages(
    prompt: Prompt, backend: str, *, prefill: bool = False, hint: str | None = None
) -> dict[str, Any]:
    """Fields of a request that hold the prompt. `prefill`: whether the server can continue a turn that has
    begun; `hint`: what else to do if it cannot. Raises Unsupported."""
    done, begun = turns(prompt, backend)
    messages = [wire(message) for message in done]
    if begun is None:
        return {"messages": messages}
    if not prefill:
        start = "start assistant(...) with gen"
        raise Unsupported(
            f"{backend} cannot continue a reply that has begun ({str(begun.content)[:60]!r})",
            hint=start if hint is None else f"{start}, {hint}",
        )
    messages.append(wire(begun))
    return {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def chat_fields(call: Call, form: JsonForm | None, limit_field: str) -> dict[str, Any]:
    """The other fields of a chat request. limit_field: the name of max_new_tokens."""
    body: dict[str, Any] = {
        limit_field: call.sampling.max_new_tokens,
        **offered(call.prompt.tools, call.tool_choice, call.parallel_tools),
    }
    if call.n > 1:
        body["n"] = call.n
    if call.wants_logprobs:
        body |= {"logprobs": True, "top_logprobs": call.top_logprobs}
    if form is not None:
        schema = {"name": form.name, "schema": form.schema, "strict": form.strict}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def offered(
    tools: Sequence[Mapping[str, Any]], choice: str = "none", parallel: bool = True
) -> dict[str, Any]:
    """Fields of a request; none without tools. A tool whose schema fits strict mode is sent as strict."""
    if not tools:
        return {}
    functions: list[dict[str, Any]] = []
    for tool in tools:
        function = dict(tool["function"])
        if is_strict(function.get("parameters") or {}):
            function.setdefault("strict", True)
        functions.append({"type": "function", "function": function})
    named = {"type": "function", "function": {"name": choice[1:]}}
    body: dict[str, Any] = {"tools": functions, "tool_choice": named if choice.startswith("=") else choice}
    return body if parallel or choice == "none" else {**body, "parallel_tool_calls": False}


def called(message: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a message's tool calls; empty without any."""
    calls = [
        {"id": call.get("id"), "name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        for call in message.get("tool_calls") or ()
        if isinstance(call.get("function"), Mapping)
    ]
    return {"tool_calls": calls} if calls else {}


def wire(message: Message) -> dict[str, Any]:
    """A turn as the chat API takes it."""
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    if not isinstance(message.content, str):
        turn["content"] = [_part(part) for part in message.content]
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return turn


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a turn; embedded sounds as the API takes them, {"data", "format"}."""
    match part:
        case {"type": "audio_url", "audio_url": {"url": str(url)}}:
            match = re.match(r"data:audio/([\w.+-]+);base64,(.*)\Z", url, re.DOTALL)
            if match is None:
                return dict(part)
            name = {"mpeg": "mp3"}.get(match[1], match[1])
            return {"type": "input_audio", "input_audio": {"data": match[2], "format": name}}
        case _:
            return dict(part)


class OpenAIReply(ApiReply):
    """The reply to a request of chat completions, or of completions."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}
        self._logprobs: list[tuple[float, None, str]] = []
        self._tops: list[list[tuple[float, None, str]]] = []

    @staticmethod
    def samples(answer: Any, n: int) -> list[dict[str, Any]]:
        match answer:
            case {"choices": list(choices)} if len(choices) == n:
                ordered = sorted(choices, key=lambda one: one.get("index", 0))
                return [{**answer, "choices": [one]} for one in ordered]
            case {"choices": list(choices)}:
                raise BackendError(f"the API sent {len(choices)} texts for {n}")
            case _:
                raise BackendError(f"the API's answer is not a completion: {str(answer)[:200]!r}")

    def event(self, data: dict[str, Any]) -> Delta:
        if error := data.get("error"):
            message = error.get("message") if isinstance(error, dict) else error
            raise BackendError(f"the stream ended with an error: {message}")
        self._known |= _usage(data.get("usage") or {})
        self._known |= {key: data[key] for key in ("id", "model") if data.get(key)}
        text = reasoning = ""
        for choice in data.get("choices") or ():
            message = choice.get("message") or choice.get("delta") or {}
            if isinstance(message.get("refusal"), str):
                raise BackendError(f"the model refused: {message['refusal']:.500}")
            # Servers use one of two names for the reasoning, or both.
            thought = message.get("reasoning_content") or message.get("reasoning")
            reasoning += thought if isinstance(thought, str) else ""
            text += message.get("content") or choice.get("text") or ""
            self._take_logprobs(choice.get("logprobs"))
            if choice.get("message"):
                self._known |= called(message)
            if (finish := choice.get("finish_reason")) is not None:
                self.finished = True
                kind = _FINISHES.get(finish, finish)
                reason = {} if kind == finish else {"reason": finish}
                self._known["finish_reason"] = {"type": kind, **reason}
        return Delta(text, reasoning=reasoning)

    def meta(self) -> dict[str, Any]:
        if not self._logprobs:
            return self._known
        logprobs = {"output_token_logprobs": self._logprobs, "output_top_logprobs": self._tops}
        return {**self._known, **logprobs}

    def _take_logprobs(self, logprobs: Any) -> None:
        """Keep (log-probability, id, text) of each token. The API returns no ids."""
        if not isinstance(logprobs, dict):
            return
        if isinstance(logprobs.get("content"), list):
            for token in logprobs["content"]:
                self._logprobs.append((token["logprob"], None, token["token"]))
                tops = token.get("top_logprobs") or ()
                self._tops.append([(top["logprob"], None, top["token"]) for top in tops])
            return
        tokens, values = logprobs.get("tokens") or (), logprobs.get("token_logprobs") or ()
        best = logprobs.get("top_logprobs") or [None] * len(tokens)
        for token, value, tops in zip(tokens, values, best):
            self._logprobs.append((value, None, token))
            self._tops.append([(lp, None, text) for text, lp in (tops or {}).items()])


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    meta = {key: usage[key] for key in ("prompt_tokens", "completion_tokens") if usage.get(key) is not None}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    if cached is not None:
        meta["cached_tokens"] = cached
    if reasoning is not None:
        meta["reasoning_tokens"] = reasoning
    return meta
