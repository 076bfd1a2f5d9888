"""LangChainModel: a LangChain chat model over any backend, also the engine in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeAlias

from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import ConfigDict, Field, PrivateAttr

from sglang_dsl.conversation.requests import Call, Completion
from sglang_dsl.errors import BadProgram
from sglang_dsl.integrations.chat import Chat, arguments_of, finish_of, usage_of
from sglang_dsl.ir import typed as types

Stop: TypeAlias = list[str] | None


class LangChainModel(BaseChatModel):
    """`backend`: what run's `backend=` takes, an Engine for example; None: the default backend. `timeout`:
    seconds per request. `model_kwargs`: others of gen's keyword arguments (min_p, top_k, regex, ...), which
    each call accepts, too.

    Calls of tools (bind_tools) are in the model's own format. A grammar enforces their schemas, and that of
    with_structured_output(). Raises BadProgram, NoBackend, BackendError.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    backend: Any = Field(default=None, exclude=True)
    timeout: float | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    _chat: Chat = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        super().model_post_init(context)
        names = ("temperature", "max_tokens", "top_p", "seed", "stop")
        if both := sorted(self.model_kwargs.keys() & {*names}):
            raise BadProgram(f"{', '.join(both)}: pass it to LangChainModel itself, not in model_kwargs")
        options = {name: getattr(self, name) for name in names} | self.model_kwargs
        self._chat = Chat("LangChainModel", self.backend, self.timeout, **options)

    @property
    def _llm_type(self) -> str:
        return "sglang-dsl"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self._chat.model, **self._chat.options}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        return {**super()._get_ls_params(stop=stop, **kwargs), "ls_model_name": self._chat.model}

    def _generate(
        self, messages: list[BaseMessage], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return _result(self._chat.begin(self._call(messages, stop, kwargs)).whole())

    async def _agenerate(
        self, messages: list[BaseMessage], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        return _result(await self._chat.begin(self._call(messages, stop, kwargs)).awhole())

    def _stream(
        self, messages: list[BaseMessage], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        reply = self._chat.begin(self._call(messages, stop, kwargs), stream=True)
        for piece in reply.pieces():
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager is not None:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield _last(reply.whole())

    async def _astream(
        self, messages: list[BaseMessage], stop: Stop = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        reply = self._chat.begin(self._call(messages, stop, kwargs), stream=True)
        async for piece in reply.apieces():
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager is not None:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield _last(await reply.awhole())

    def _call(self, messages: list[BaseMessage], stop: Stop, kwargs: dict[str, Any]) -> Call:
        kwargs.pop("ls_structured_output_format", None)  # only for LangSmith's traces
        if stop:
            kwargs["stop"] = stop
        return self._chat.call(convert_to_openai_messages(messages), **kwargs)

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | Any],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        parallel_tool_calls: bool = True,
        **kwargs: Any,
    ) -> Runnable[Any, AIMessage]:
        """This model with tools to call. `tool_choice`: "auto", "any", "none" or a tool's name. The arguments
        of calls always match the tool's schema."""
        kwargs.pop("strict", None)  # always
        kwargs |= {"tool_choice": tool_choice, "parallel_tool_calls": parallel_tool_calls}
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: str = "json_schema",
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[Any, Any]:
        """This model with replies that match a schema, parsed: instances of a pydantic model, or dicts for a
        TypedDict or a JSON schema. `method`: "json_schema", or "function_calling" for a tool that it must
        call. Raises BadProgram."""
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **kwargs)
        if method != "json_schema":
            raise BadProgram(f'method must be "json_schema" or "function_calling", got {method!r:.80}')
        if strict is False:
            raise BadProgram("strict=False is not supported: a grammar enforces the schema")
        # types.schema() forbids other members than those of the type; a JSON schema may do so itself.
        json_schema = types.schema(schema) if isinstance(schema, type) else convert_to_json_schema(schema)
        model = self.bind(json_schema=json_schema, **kwargs)
        parser: Any = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        if not include_raw:
            return model | parser
        read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        unread = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | read.with_fallbacks([unread], exception_key="parsing_error")


def _metadata(done: Completion) -> dict[str, Any]:
    prompt, reply, cached = usage_of(done.meta)
    kept = {name: value for name, value in done.meta.items() if name not in ("tool_calls", "finish_reason")}
    return {
        "usage_metadata": UsageMetadata(
            input_tokens=prompt,
            output_tokens=reply,
            total_tokens=prompt + reply,
            input_token_details=InputTokenDetails(cache_read=cached),
        ),
        "response_metadata": {**kept, "finish_reason": finish_of(done.meta), "model_provider": "sglang-dsl"},
    }


def _result(done: Completion) -> ChatResult:
    calls, invalid = [], []
    for call in done.meta.get("tool_calls") or ():
        arguments = arguments_of(call["arguments"])
        if arguments is None:
            error = "the arguments are no JSON object"
            raw = call["arguments"]
            invalid.append(invalid_tool_call(name=call["name"], args=raw, id=call["id"], error=error))
        else:
            calls.append(tool_call(name=call["name"], args=arguments, id=call["id"]))
    text, metadata = done.texts[0], _metadata(done)
    message = AIMessage(content=text, tool_calls=calls, invalid_tool_calls=invalid, **metadata)
    return ChatResult(generations=[ChatGeneration(message=message)])


def _last(done: Completion) -> ChatGenerationChunk:
    calls = [
        tool_call_chunk(name=call["name"], args=call["arguments"], id=call["id"], index=index)
        for index, call in enumerate(done.meta.get("tool_calls") or ())
    ]
    message = AIMessageChunk(content="", tool_call_chunks=calls, chunk_position="last", **_metadata(done))
    return ChatGenerationChunk(message=message)
