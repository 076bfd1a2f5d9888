"""LlamaIndexModel: a LlamaIndex LLM over any backend, also the engine in this process."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from typing import Any, TypeVar

from llama_index.core.base.llms import types
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection

from sglang_dsl.conversation.requests import Completion
from sglang_dsl.errors import BackendError, BadProgram
from sglang_dsl.integrations.chat import Chat, Reply, arguments_of, finish_of, schema_of

R = TypeVar("R")


class LlamaIndexModel(FunctionCallingLLM):  # type: ignore[misc, unused-ignore]
    """`backend`: what run's `backend=` takes, an Engine for example; None: the default backend. `timeout`:
    seconds per request. `context_window`: tokens of a prompt and its reply together, by which LlamaIndex cuts
    texts. `additional_kwargs`: others of gen's keyword arguments (top_p, seed, regex, ...), which each call
    accepts, too.

    complete() continues a plain text. A grammar enforces the schemas of calls of tools, which
    structured_predict() and as_structured_llm() use, too. Raises BadProgram, NoBackend, BackendError.
    """

    backend: Any = Field(default=None, exclude=True)
    timeout: float | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    context_window: int = 2048
    additional_kwargs: dict[str, Any] = Field(default_factory=dict)
    _chat: Chat = PrivateAttr()

    def __init__(self, **data: Any) -> None:
        super().__init__(**data)
        options = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        if both := sorted(self.additional_kwargs.keys() & options.keys()):
            raise BadProgram(
                f"{', '.join(both)}: pass it to LlamaIndexModel itself, not in additional_kwargs"
            )
        self._chat = Chat("LlamaIndexModel", self.backend, self.timeout, **options, **self.additional_kwargs)

    @classmethod
    def class_name(cls) -> str:
        return "LlamaIndexModel"

    @property
    def metadata(self) -> types.LLMMetadata:
        return types.LLMMetadata(
            context_window=self.context_window,
            num_output=self.max_tokens or 128,
            is_chat_model=True,
            is_function_calling_model=True,
            model_name=self._chat.model,
        )

    # -- requests --------------------------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[types.ChatMessage], **kwargs: Any) -> types.ChatResponse:
        return _chat_response(self._send(messages, kwargs).whole())

    @llm_chat_callback()
    async def achat(self, messages: Sequence[types.ChatMessage], **kwargs: Any) -> types.ChatResponse:
        return _chat_response(await self._send(messages, kwargs).awhole())

    @llm_chat_callback()
    def stream_chat(
        self, messages: Sequence[types.ChatMessage], **kwargs: Any
    ) -> Generator[types.ChatResponse, None, None]:
        return _stream(self._send(messages, kwargs, stream=True), _chat_response)

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[types.ChatMessage], **kwargs: Any
    ) -> AsyncGenerator[types.ChatResponse, None]:
        return _astream(self._send(messages, kwargs, stream=True), _chat_response)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> types.CompletionResponse:
        return _completion_response(self._send(prompt, kwargs).whole())

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> types.CompletionResponse:
        return _completion_response(await self._send(prompt, kwargs).awhole())

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> Generator[types.CompletionResponse, None, None]:
        return _stream(self._send(prompt, kwargs, stream=True), _completion_response)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncGenerator[types.CompletionResponse, None]:
        return _astream(self._send(prompt, kwargs, stream=True), _completion_response)

    def _send(
        self, prompt: str | Sequence[types.ChatMessage], kwargs: dict[str, Any], *, stream: bool = False
    ) -> Reply:
        if isinstance(prompt, str):
            schema = schema_of(kwargs.pop("response_format", None))
            call = self._chat.completion(prompt, **schema, **kwargs)
        else:
            call = self._chat.call([_message(one) for one in prompt], **kwargs)
        return self._chat.begin(call, stream=stream)

    # -- tools -----------------------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[Any],
        user_msg: str | types.ChatMessage | None = None,
        chat_history: list[types.ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        messages = list(chat_history or ())
        if user_msg is not None:
            is_text = isinstance(user_msg, str)
            messages.append(types.ChatMessage(user_msg, role=types.MessageRole.USER) if is_text else user_msg)
        return {
            "messages": messages,
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": kwargs.pop("tool_choice", None) or ("required" if tool_required else "auto"),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: types.ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """The tools that a reply calls. Raises BackendError if it calls none, unless switched off."""
        blocks = [one for one in response.message.blocks if isinstance(one, types.ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            raise BackendError("the model called no tool", hint="pass tool_required=True to force a call")
        return [
            ToolSelection(
                tool_id=one.tool_call_id or "", tool_name=one.tool_name, tool_kwargs=one.tool_kwargs
            )
            for one in blocks
        ]


def _message(message: types.ChatMessage) -> dict[str, Any]:
    """A message in the format of chat APIs. Raises BadProgram."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in message.blocks:
        match block:
            case types.TextBlock():
                parts.append({"type": "text", "text": block.text})
            case types.ImageBlock():
                parts.append({"type": "image_url", "image_url": {"url": _address(block)}})
            case types.ThinkingBlock():
                pass  # the reasoning of earlier turns is not sent
            case types.ToolCallBlock():
                arguments = block.tool_kwargs
                if not isinstance(arguments, str):
                    arguments = json.dumps(arguments, ensure_ascii=False)
                function = {"name": block.tool_name, "arguments": arguments}
                calls.append({"id": block.tool_call_id, "type": "function", "function": function})
            case _:
                raise BadProgram(f"LlamaIndexModel supports text, images and tools, got {block.block_type}")
    fields: dict[str, Any] = {"role": message.role.value, "content": parts, "tool_calls": calls}
    if message.role == types.MessageRole.TOOL:
        fields["tool_call_id"] = message.additional_kwargs.get("tool_call_id")
    return fields


def _address(block: types.ImageBlock) -> str:
    if block.url is not None:
        return str(block.url)
    data = base64.b64encode(block.resolve_image().read()).decode()
    return f"data:{block.image_mimetype or 'image/png'};base64,{data}"


def _chat_response(done: Completion, delta: str | None = None) -> types.ChatResponse:
    blocks: list[Any] = [types.TextBlock(text=done.texts[0])] if done.texts[0] else []
    blocks += [
        types.ToolCallBlock(
            tool_call_id=call["id"],
            tool_name=call["name"],
            tool_kwargs=arguments_of(call["arguments"]) or call["arguments"],
        )
        for call in done.meta.get("tool_calls") or ()
    ]
    message = types.ChatMessage(blocks, role=types.MessageRole.ASSISTANT)
    return types.ChatResponse(message=message, delta=delta, **_metadata(done))


def _completion_response(done: Completion, delta: str | None = None) -> types.CompletionResponse:
    return types.CompletionResponse(text=done.texts[0], delta=delta, **_metadata(done))


def _metadata(done: Completion) -> dict[str, Any]:
    if not done.meta:  # of a stream that goes on
        return {}
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    counts = {name: done.meta.get(name) for name in names}
    return {"raw": dict(done.meta), "additional_kwargs": counts | {"finish_reason": finish_of(done.meta)}}


def _stream(reply: Reply, response: Callable[[Completion, str], R]) -> Generator[R, None, None]:
    """A response with the text so far for each piece, and one for the end."""
    text = ""
    for piece in reply.pieces():
        text += piece
        yield response(Completion((text,), {}), piece)
    yield response(reply.whole(), "")


async def _astream(reply: Reply, response: Callable[[Completion, str], R]) -> AsyncGenerator[R, None]:
    text = ""
    async for piece in reply.apieces():
        text += piece
        yield response(Completion((text,), {}), piece)
    yield response(await reply.awhole(), "")
