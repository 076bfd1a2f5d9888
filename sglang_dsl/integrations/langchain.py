"""LangChainModel: a LangChain chat model over any backend, the engine in this process among them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

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
from sglang_dsl.integrations.chat import Chat, arguments_of, finish_of, schema_of, usage_of
from sglang_dsl.ir import typed as types


class LangChainModel(BaseChatModel):
    """`backend`: what run's `backend=` takes, an Engine for example; None: the default backend. `timeout`:
    seconds a request may take. model_kwargs: more of gen's keyword arguments (min_p, top_k, regex, ...);
    they may be given to each call, too.

    Tools (bind_tools) are called in the model's own format, and a grammar keeps the calls to their schemas.
    with_structured_output() keeps the reply to the schema. Raises BadProgram, NoBackend, BackendError.
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
        words = {name: getattr(self, name) for name in ("temperature", "max_tokens", "top_p", "seed", "stop")}
        if both := sorted(self.model_kwargs.keys() & words.keys()):
            raise BadProgram(f"{', '.join(both)}: pass it to LangChainModel itself, not in model_kwargs")
        self._chat = Chat("LangChainModel", self.backend, self.timeout, **words, **self.model_kwargs)

    @property
    def _llm_type(self) -> str:
        return "sglang-dsl"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model": self._chat.model, **self._chat.words}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        made = super()._get_ls_params(stop=stop, **kwargs)
        made["ls_model_name"] = self._chat.model
        return made

    # -- what LangChain asks for -----------------------------------------------------------------------------

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **words: Any,
    ) -> ChatResult:
        return _result(self._chat.begin(self._call(messages, stop, words)).whole())

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **words: Any,
    ) -> ChatResult:
        return _result(await self._chat.begin(self._call(messages, stop, words)).awhole())

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **words: Any,
    ) -> Iterator[ChatGenerationChunk]:
        reply = self._chat.begin(self._call(messages, stop, words), stream=True)
        for piece in reply.pieces():
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager is not None:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield _last(reply.whole())

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **words: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        reply = self._chat.begin(self._call(messages, stop, words), stream=True)
        async for piece in reply.apieces():
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager is not None:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield _last(await reply.awhole())

    def _call(self, messages: list[BaseMessage], stop: list[str] | None, words: dict[str, Any]) -> Call:
        words.pop("ls_structured_output_format", None)  # for LangSmith's traces alone
        return self._chat.call(
            convert_to_openai_messages(messages),
            words.pop("tools", None) or (),
            words.pop("tool_choice", None),
            words.pop("parallel_tool_calls", True),
            **{"stop": stop} if stop else {},
            **schema_of(words.pop("response_format", None)),
            **words,
        )

    # -- tools and structured output -------------------------------------------------------------------------

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | Any],
        *,
        tool_choice: str | dict[str, Any] | bool | None = None,
        parallel_tool_calls: bool = True,
        **words: Any,
    ) -> Runnable[Any, AIMessage]:
        """This model with tools to call. tool_choice: "auto", "any", "none" or a tool's name. A call always
        has all arguments that its tool's schema requires, and no others."""
        words.pop("strict", None)  # it is always so
        made = [convert_to_openai_tool(tool) for tool in tools]
        return self.bind(
            tools=made, tool_choice=tool_choice, parallel_tool_calls=parallel_tool_calls, **words
        )

    def with_structured_output(
        self,
        schema: dict[str, Any] | type,
        *,
        include_raw: bool = False,
        method: str = "json_schema",
        strict: bool | None = None,
        **words: Any,
    ) -> Runnable[Any, Any]:
        """This model with its reply kept to a schema and read: a pydantic model gives instances of it, a
        TypedDict or a JSON schema gives dicts. method: "json_schema", or "function_calling" for a tool that
        it has to call. Raises BadProgram."""
        if method == "function_calling":
            return super().with_structured_output(schema, include_raw=include_raw, **words)
        if method != "json_schema":
            raise BadProgram(f'method must be "json_schema" or "function_calling", got {method!r:.80}')
        if strict is False:
            raise BadProgram("strict=False is not supported: a grammar enforces the schema")
        # A type's objects have the members that it names and no others; a JSON schema says that itself.
        made = types.schema(schema) if isinstance(schema, type) else convert_to_json_schema(schema)
        model = self.bind(json_schema=made, **words)
        parser: Any = JsonOutputParser()
        if isinstance(schema, type) and is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        if not include_raw:
            return model | parser
        read = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        unread = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | read.with_fallbacks([unread], exception_key="parsing_error")


def _told(done: Completion) -> dict[str, Any]:
    """What is said of a reply: fields of its message."""
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
    called, wrong = [], []
    for call in done.meta.get("tool_calls") or ():
        arguments = arguments_of(call)
        if arguments is None:
            said = {"name": call["name"], "args": call["arguments"], "id": call["id"]}
            wrong.append(invalid_tool_call(**said, error="the arguments are no JSON object"))
        else:
            called.append(tool_call(name=call["name"], args=arguments, id=call["id"]))
    told = _told(done)
    message = AIMessage(content=done.texts[0], tool_calls=called, invalid_tool_calls=wrong, **told)
    return ChatResult(generations=[ChatGeneration(message=message)])


def _last(done: Completion) -> ChatGenerationChunk:
    """The end of a stream: its calls, and what is said of it."""
    calls = [
        tool_call_chunk(name=call["name"], args=call["arguments"], id=call["id"], index=index)
        for index, call in enumerate(done.meta.get("tool_calls") or ())
    ]
    message = AIMessageChunk(content="", tool_call_chunks=calls, chunk_position="last", **_told(done))
    return ChatGenerationChunk(message=message)
