"""dspy_lm: a dspy.LM over any backend, also the engine in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import dspy
from dspy import lm15

from sglang_dsl.conversation.requests import Call, Completion
from sglang_dsl.errors import BackendError, BadProgram, Timeout, Unsupported
from sglang_dsl.integrations.chat import Chat, Reply, arguments_of, finish_of, usage_of

_FINISH = {"tool_calls": "tool_call", "length": "length"}
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


def dspy_lm(
    backend: Any = None, *, timeout: float | None = None, cache: bool = False, **kwargs: Any
) -> dspy.LM:
    """A language model for dspy.configure(lm=...). `backend`: what run's `backend=` takes, an Engine for
    example; None: the default backend. `timeout`: seconds per request. `cache`: DSPy's own cache of replies,
    on disk. `kwargs`: temperature, max_tokens and others that dspy.LM takes for all its calls.

    Grammars enforce the tools and response formats of adapters. Raises BadProgram, NoBackend.
    """
    chat = Chat("dspy_lm", backend, timeout)
    return dspy.LM(
        f"sglang-dsl/{chat.model}", engine=Engine(chat), async_engine=AsyncEngine(chat), cache=cache, **kwargs
    )


class _Engine:
    """The capabilities that DSPy's adapters read."""

    supports_function_calling = supports_response_schema = True
    supported_params = frozenset({*_SAMPLING, "stop", "response_format", "tools", "tool_choice"})

    def __init__(self, chat: Chat) -> None:
        self.chat = chat

    def _begin(self, request: lm15.Request, *, stream: bool = False) -> Reply:
        return self.chat.begin(call_of(self.chat, request), stream=stream)


class Engine(_Engine):
    """For dspy.LM(engine=...)."""

    def complete(self, request: lm15.Request) -> lm15.Response:
        with errors():
            return response_of(self._begin(request).whole(), request)

    def stream(self, request: lm15.Request) -> Iterator[Any]:
        with errors():
            reply = self._begin(request, stream=True)
            yield lm15.StreamStartEvent(model=request.model)
            for piece in reply.pieces():
                yield lm15.StreamDeltaEvent(lm15.TextDelta(piece))
            yield from _end_events(reply.whole())

    def close(self) -> None:
        """Does nothing: the caller closes the backend."""


class AsyncEngine(_Engine):
    """For dspy.LM(async_engine=...)."""

    async def complete(self, request: lm15.Request) -> lm15.Response:
        with errors():
            return response_of(await self._begin(request).awhole(), request)

    async def stream(self, request: lm15.Request) -> AsyncIterator[Any]:
        with errors():
            reply = self._begin(request, stream=True)
            yield lm15.StreamStartEvent(model=request.model)
            async for piece in reply.apieces():
                yield lm15.StreamDeltaEvent(lm15.TextDelta(piece))
            for event in _end_events(await reply.awhole()):
                yield event

    async def aclose(self) -> None:
        """Does nothing: the caller closes the backend."""


@contextmanager
def errors() -> Iterator[None]:
    """Turns the language's errors into DSPy's, by which it decides whether to retry."""
    try:
        yield
    except (BadProgram, Unsupported) as error:
        raise lm15.InvalidRequestError(str(error)) from error
    except Timeout as error:
        raise lm15.TimeoutError(str(error)) from error
    except BackendError as error:
        raise (lm15.ServerError if error.retryable else lm15.ProviderError)(str(error)) from error


def call_of(chat: Chat, request: lm15.Request) -> Call:
    """DSPy's request as a call of a backend. Raises BadProgram for what is not supported."""
    config = request.config
    unsupported = ("reasoning", "cache", "service_tier", "user_id", "store", "logprobs", "probabilities")
    if refused := [name for name in unsupported if getattr(config, name) is not None]:
        raise BadProgram(f"dspy_lm does not support {', '.join(refused)}")
    messages = [] if request.system is None else [{"role": "system", "content": _text(request.system)}]
    for message in request.messages:
        messages += _turns(message)
    choice = config.tool_choice
    allowed = choice.allowed if choice is not None and choice.allowed else [one.name for one in request.tools]
    tools = []
    for one in request.tools:
        if one.name in allowed:
            function = {
                "name": one.name, "description": one.description or "", "parameters": one.parameters,
            }  # fmt: skip
            tools.append({"type": "function", "function": function})
    return chat.call(
        messages,
        tools,
        None if choice is None else choice.mode,
        choice is None or choice.parallel is not False,
        config.response_format,
        stop=config.stop or None,
        **{name: getattr(config, name) for name in _SAMPLING},
        **config.extensions or {},
    )


def _text(parts: Any) -> str:
    if isinstance(parts, str):
        return parts
    if others := [part.type for part in parts if part.type != "text"]:
        raise BadProgram(f"dspy_lm supports only text there, got {', '.join(others)}")
    return "".join(part.text for part in parts)


def _turns(message: lm15.Message) -> Iterator[dict[str, Any]]:
    """A message in the format of chat APIs, in which each result of a tool is a message."""
    content: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for part in message.parts:
        match part.type:
            case "text":
                content.append({"type": "text", "text": part.text})
            case "thinking":
                pass  # the reasoning of earlier turns is not sent
            case "image" if part.url or part.data:
                url = part.url or f"data:{part.media_type};base64,{part.data}"
                content.append({"type": "image_url", "image_url": {"url": url}})
            case "tool_call":
                function = {"name": part.name, "arguments": json.dumps(part.input)}
                calls.append({"id": part.id, "type": "function", "function": function})
            case "tool_result":
                yield {"role": "tool", "tool_call_id": part.id, "content": _text(part.content)}
            case kind:
                raise BadProgram(f"dspy_lm supports text, images and tools in messages, got {kind}")
    if content or calls or message.role != "tool":
        yield {"role": message.role, "content": content, "tool_calls": calls}


def response_of(done: Completion, request: lm15.Request) -> lm15.Response:
    parts: list[Any] = [lm15.TextPart(done.texts[0])] if done.texts[0] else []
    parts += [
        lm15.ToolCallPart(call["id"], call["name"], arguments_of(call["arguments"]) or {})
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


def _end_events(done: Completion) -> Iterator[Any]:
    for index, call in enumerate(done.meta.get("tool_calls") or (), 1):
        delta = lm15.ToolCallDelta(call["arguments"], part_index=index, id=call["id"], name=call["name"])
        yield lm15.StreamDeltaEvent(delta)
    yield lm15.StreamEndEvent(finish_reason=_FINISH.get(finish_of(done.meta), "stop"), usage=_usage(done))
