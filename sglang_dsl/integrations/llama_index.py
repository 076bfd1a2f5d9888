"""LlamaIndexModel: a LlamaIndex LLM over any backend, the engine in this process among them."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncGenerator, Generator, Sequence
from typing import Any

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ImageBlock,
    LLMMetadata,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection

from sglang_dsl.conversation.requests import Call, Completion
from sglang_dsl.errors import BackendError, BadProgram
from sglang_dsl.integrations.chat import Chat, arguments_of, finish_of, schema_of


class LlamaIndexModel(FunctionCallingLLM):  # type: ignore[misc, unused-ignore]
    """`backend`: what run's `backend=` takes, an Engine for example; None: the default backend. `timeout`:
    seconds a request may take. `context_window`: tokens of a prompt and its reply together, by which
    LlamaIndex cuts texts. additional_kwargs: more of gen's keyword arguments (top_p, seed, regex, ...); they
    may be given to each call, too.

    complete() goes on with a plain text. Calls of tools are kept to their schemas by a grammar, and so are
    structured_predict() and as_structured_llm(), which use one. Raises BadProgram, NoBackend, BackendError.
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
        words = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        if both := sorted(self.additional_kwargs.keys() & words.keys()):
            raise BadProgram(
                f"{', '.join(both)}: pass it to LlamaIndexModel itself, not in additional_kwargs"
            )
        self._chat = Chat("LlamaIndexModel", self.backend, self.timeout, **words, **self.additional_kwargs)

    @classmethod
    def class_name(cls) -> str:
        return "LlamaIndexModel"

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self.context_window,
            num_output=self.max_tokens or 128,
            is_chat_model=True,
            is_function_calling_model=True,
            model_name=self._chat.model,
        )

    # -- what LlamaIndex asks for ----------------------------------------------------------------------------

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **words: Any) -> ChatResponse:
        return _answer(self._chat.begin(self._call(messages, words)).whole())

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **words: Any) -> ChatResponse:
        return _answer(await self._chat.begin(self._call(messages, words)).awhole())

    @llm_chat_callback()
    def stream_chat(
        self, messages: Sequence[ChatMessage], **words: Any
    ) -> Generator[ChatResponse, None, None]:
        reply = self._chat.begin(self._call(messages, words), stream=True)

        def responses() -> Generator[ChatResponse, None, None]:
            text = ""
            for piece in reply.pieces():
                text += piece
                yield ChatResponse(message=ChatMessage(text, role=MessageRole.ASSISTANT), delta=piece)
            yield _answer(reply.whole(), delta="")

        return responses()

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **words: Any
    ) -> AsyncGenerator[ChatResponse, None]:
        reply = self._chat.begin(self._call(messages, words), stream=True)

        async def responses() -> AsyncGenerator[ChatResponse, None]:
            text = ""
            async for piece in reply.apieces():
                text += piece
                yield ChatResponse(message=ChatMessage(text, role=MessageRole.ASSISTANT), delta=piece)
            yield _answer(await reply.awhole(), delta="")

        return responses()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **words: Any) -> CompletionResponse:
        return _text(self._chat.begin(self._completion(prompt, words)).whole())

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **words: Any) -> CompletionResponse:
        return _text(await self._chat.begin(self._completion(prompt, words)).awhole())

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **words: Any
    ) -> Generator[CompletionResponse, None, None]:
        reply = self._chat.begin(self._completion(prompt, words), stream=True)

        def responses() -> Generator[CompletionResponse, None, None]:
            text = ""
            for piece in reply.pieces():
                text += piece
                yield CompletionResponse(text=text, delta=piece)
            yield _text(reply.whole(), delta="")

        return responses()

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **words: Any
    ) -> AsyncGenerator[CompletionResponse, None]:
        reply = self._chat.begin(self._completion(prompt, words), stream=True)

        async def responses() -> AsyncGenerator[CompletionResponse, None]:
            text = ""
            async for piece in reply.apieces():
                text += piece
                yield CompletionResponse(text=text, delta=piece)
            yield _text(await reply.awhole(), delta="")

        return responses()

    def _completion(self, prompt: str, words: dict[str, Any]) -> Call:
        return self._chat.completion(prompt, **schema_of(words.pop("response_format", None)), **words)

    def _call(self, messages: Sequence[ChatMessage], words: dict[str, Any]) -> Call:
        return self._chat.call(
            [_message(one) for one in messages],
            words.pop("tools", None) or (),
            words.pop("tool_choice", None),
            words.pop("parallel_tool_calls", True),
            **schema_of(words.pop("response_format", None)),
            **words,
        )

    # -- tools -----------------------------------------------------------------------------------------------

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[Any],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **words: Any,
    ) -> dict[str, Any]:
        asked = ChatMessage(user_msg, role=MessageRole.USER) if isinstance(user_msg, str) else user_msg
        return {
            "messages": [*(chat_history or ()), *(() if asked is None else (asked,))],
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "tool_choice": words.pop("tool_choice", None) or ("required" if tool_required else "auto"),
            "parallel_tool_calls": allow_parallel_tool_calls,
            **words,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **words: Any
    ) -> list[ToolSelection]:
        """The tools that a reply calls. Raises BackendError where it calls none, unless told otherwise."""
        blocks = [one for one in response.message.blocks if isinstance(one, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            raise BackendError("the model called no tool", hint="pass tool_required=True to force a call")
        return [
            ToolSelection(
                tool_id=one.tool_call_id or "", tool_name=one.tool_name, tool_kwargs=one.tool_kwargs
            )
            for one in blocks
        ]


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message of LlamaIndex's, as chat APIs have it. Raises BadProgram."""
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for block in message.blocks:
        match block:
            case TextBlock():
                parts.append({"type": "text", "text": block.text})
            case ImageBlock():
                parts.append({"type": "image_url", "image_url": {"url": _address(block)}})
            case ThinkingBlock():
                pass  # finished turns go to the model without their reasoning
            case ToolCallBlock():
                made = {"name": block.tool_name, "arguments": _json(block.tool_kwargs)}
                calls.append({"id": block.tool_call_id, "type": "function", "function": made})
            case _:
                raise BadProgram(f"LlamaIndexModel supports text, images and tools, got {block.block_type}")
    said: dict[str, Any] = {"role": message.role.value, "content": parts, "tool_calls": calls}
    if message.role == MessageRole.TOOL:
        said["tool_call_id"] = message.additional_kwargs.get("tool_call_id")
    return said


def _address(block: ImageBlock) -> str:
    if block.url is not None:
        return str(block.url)
    data = base64.b64encode(block.resolve_image().read()).decode()
    return f"data:{block.image_mimetype or 'image/png'};base64,{data}"


def _json(arguments: dict[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _answer(done: Completion, delta: str | None = None) -> ChatResponse:
    blocks: list[Any] = [TextBlock(text=done.texts[0])] if done.texts[0] else []
    blocks += [
        ToolCallBlock(
            tool_call_id=call["id"],
            tool_name=call["name"],
            tool_kwargs=arguments_of(call) or call["arguments"],
        )
        for call in done.meta.get("tool_calls") or ()
    ]
    message = ChatMessage(blocks, role=MessageRole.ASSISTANT)
    return ChatResponse(message=message, raw=dict(done.meta), delta=delta, additional_kwargs=_told(done))


def _text(done: Completion, delta: str | None = None) -> CompletionResponse:
    return CompletionResponse(
        text=done.texts[0], raw=dict(done.meta), delta=delta, additional_kwargs=_told(done)
    )


def _told(done: Completion) -> dict[str, Any]:
    names = ("prompt_tokens", "completion_tokens", "cached_tokens")
    return {name: done.meta.get(name) for name in names} | {"finish_reason": finish_of(done.meta)}
