"""dspy_lm: a dspy.LM over any backend, the engine in this process among them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import dspy
from dspy import lm15

from sglang_dsl.conversation.requests import Call, Completion
from sglang_dsl.errors import BackendError, BadProgram, Timeout, Unsupported
from sglang_dsl.integrations.chat import Chat, arguments_of, finish_of, schema_of, usage_of

_FINISH = {"tool_calls": "tool_call", "length": "length"}
_TAKEN = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


def dspy_lm(
    backend: Any = None, *, timeout: float | None = None, cache: bool = False, **words: Any
) -> dspy.LM:
    """A language model for dspy.configure(lm=...). `backend`: what run's `backend=` takes, an Engine for
    example; None: the default backend. `timeout`: seconds a request may take. `cache`: DSPy's own cache of
    replies, on disk. `words`: temperature, max_tokens and others that dspy.LM takes for all its calls.

    Tools and response formats of adapters are kept to by grammars. Raises BadProgram, NoBackend.
    """
    chat = Chat("dspy_lm", backend, timeout)
    return dspy.LM(
        f"sglang-dsl/{chat.model}", engine=Engine(chat), async_engine=AsyncEngine(chat), cache=cache, **words
    )


class _Engine:
    """What DSPy's adapters look at."""

    supports_function_calling = supports_response_schema = True
    supported_params = frozenset({*_TAKEN, "stop", "response_format", "tools", "tool_choice"})

    def __init__(self, chat: Chat) -> None:
        self.chat = chat


class Engine(_Engine):
    """What dspy.LM(engine=...) takes: one request, one response."""

    def complete(self, request: lm15.Request) -> lm15.Response:
        with errors():
            return response_of(self.chat.begin(call_of(self.chat, request)).whole(), request)

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        with errors():
            reply = self.chat.begin(call_of(self.chat, request), stream=True)
            yield lm15.StreamStartEvent(model=request.model)
            for piece in reply.pieces():
                yield lm15.StreamDeltaEvent(lm15.TextDelta(piece))
            yield from _ended(reply.whole())

    def close(self) -> None:
        """The backend is the caller's."""


class AsyncEngine(_Engine):
    """And dspy.LM(async_engine=...)."""

    async def complete(self, request: lm15.Request) -> lm15.Response:
        with errors():
            return response_of(await self.chat.begin(call_of(self.chat, request)).awhole(), request)

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        with errors():
            reply = self.chat.begin(call_of(self.chat, request), stream=True)
            yield lm15.StreamStartEvent(model=request.model)
            async for piece in reply.apieces():
                yield lm15.StreamDeltaEvent(lm15.TextDelta(piece))
            for event in _ended(await reply.awhole()):
                yield event

    async def aclose(self) -> None:
        """The backend is the caller's."""


@contextmanager
def errors() -> Iterator[None]:
    """The language's errors as those that DSPy expects of an engine, which say whether to try again."""
    try:
        yield
    except (BadProgram, Unsupported) as error:
        raise lm15.InvalidRequestError(str(error)) from error
    except Timeout as error:
        raise lm15.TimeoutError(str(error)) from error
    except BackendError as error:
        raise (lm15.ServerError if error.retryable else lm15.ProviderError)(str(error)) from error


def call_of(chat: Chat, request: lm15.Request) -> Call:
    """DSPy's request as a call of a backend. Raises BadProgram for what is not offered."""
    config = request.config
    left = ("reasoning", "cache", "service_tier", "user_id", "store", "logprobs", "probabilities")
    if refused := [name for name in left if getattr(config, name) is not None]:
        raise BadProgram(f"dspy_lm does not support {', '.join(refused)}")
    words = {name: getattr(config, name) for name in _TAKEN} | {"stop": config.stop or None}
    messages = [] if request.system is None else [{"role": "system", "content": _text(request.system)}]
    for message in request.messages:
        messages += _turns(message)
    tools: list[dict[str, Any]] = [
        {
            "type": "function",
            "function": {
                "name": one.name,
                "description": one.description or "",
                "parameters": one.parameters,
            },
        }
        for one in request.tools
    ]
    wanted = config.tool_choice
    if wanted is not None and wanted.allowed:
        tools = [tool for tool in tools if tool["function"]["name"] in wanted.allowed]
    return chat.call(
        messages,
        tools,
        None if wanted is None else wanted.mode,
        wanted is None or wanted.parallel is not False,
        **words,
        **schema_of(config.response_format),
        **config.extensions or {},
    )


def _text(parts: Any) -> str:
    if isinstance(parts, str):
        return parts
    if others := [part.type for part in parts if part.type != "text"]:
        raise BadProgram(f"dspy_lm supports only text there, got {', '.join(others)}")
    return "".join(part.text for part in parts)


def _turns(message: lm15.Message) -> Iterator[dict[str, Any]]:
    """A message of DSPy's, as chat APIs have it: results of tools are messages of their own."""
    said: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for part in message.parts:
        match part.type:
            case "text":
                said.append({"type": "text", "text": part.text})
            case "thinking":
                pass  # finished turns go to the model without their reasoning
            case "image" if part.url:
                said.append({"type": "image_url", "image_url": {"url": part.url}})
            case "image" if part.data:
                url = f"data:{part.media_type};base64,{part.data}"
                said.append({"type": "image_url", "image_url": {"url": url}})
            case "tool_call":
                function = {"name": part.name, "arguments": json.dumps(part.input)}
                calls.append({"id": part.id, "type": "function", "function": function})
            case "tool_result":
                yield {"role": "tool", "tool_call_id": part.id, "content": _text(part.content)}
            case kind:
                raise BadProgram(f"dspy_lm supports text, images and tools in messages, got {kind}")
    if said or calls or message.role != "tool":
        yield {"role": message.role, "content": said, "tool_calls": calls}


def response_of(done: Completion, request: lm15.Request) -> lm15.Response:
    """A backend's reply as DSPy's."""
    parts: list[Any] = [lm15.TextPart(done.texts[0])] if done.texts[0] else []
    parts += [
        lm15.ToolCallPart(call["id"], call["name"], arguments_of(call) or {})
        for call in done.meta.get("tool_calls") or ()
    ]
    return lm15.Response(
        id=done.meta.get("id"),
        model=request.model,
        message=lm15.Message.assistant(parts or ""),
        finish_reason=_FINISH.get(finish_of(done.meta), "stop"),
        usage=_usage(done),
    )


def _usage(done: Completion) -> lm15.Usage:
    prompt, reply, cached = usage_of(done.meta)
    return lm15.Usage(
        input_tokens=prompt, output_tokens=reply, total_tokens=prompt + reply, cache_read_tokens=cached
    )


def _ended(done: Completion) -> Iterator[Any]:
    """What ends a stream: its calls of tools, and its usage."""
    for index, call in enumerate(done.meta.get("tool_calls") or (), 1):
        delta = lm15.ToolCallDelta(call["arguments"], part_index=index, id=call["id"], name=call["name"])
        yield lm15.StreamDeltaEvent(delta)
    yield lm15.StreamEndEvent(finish_reason=_FINISH.get(finish_of(done.meta), "stop"), usage=_usage(done))
