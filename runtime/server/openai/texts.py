"""The ids of a text or a conversation, and back; and a model's text, split into content and tool calls, or
into reasoning and answer.

POST /tokenize {"prompt": "Hello"} -> {"tokens": [...], "count": 3, "max_model_len": 4096}
POST /parse_function_call {"text": "...", "tools": [...], "tool_call_parser": "qwen25"}
    -> {"normal_text": "...", "calls": [...]}
POST /separate_reasoning {"text": "...", "reasoning_parser": "qwen3"}
    -> {"text": "...", "reasoning_text": "..."}
"""

from __future__ import annotations

from typing import Any, cast

import msgspec
from starlette.requests import Request

from runtime.formats.chat.render import conversation
from runtime.formats.reasoning.marks import AUTO, reasoning_type
from runtime.formats.reasoning.splitter import split_reasoning
from runtime.formats.tools import FunctionCallParser, ToolCallItem
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import UnknownName
from runtime.protocol.requests.generate import GenerateReqInput
from runtime.server.context import RouteGroup, serves
from runtime.server.http.body import expect
from runtime.server.http.openapi import Operation, body_schema
from runtime.server.openai.messages import messages_of, tools_of

MOST_TO_TOKENIZE, MOST_TO_PARSE = 4 << 20, 1 << 20
"""Characters of one text, at most."""


class Tokenize(msgspec.Struct, forbid_unknown_fields=True):
    """prompt or messages, not both. A list of prompts gives a list of lists. Messages give the ids that
    /v1/chat/completions makes of them; tools are put into the prompt unless tool_choice is "none"."""

    prompt: Any = None
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class Tokens(msgspec.Struct):
    """Lists of lists where several prompts were given."""

    tokens: list[int | list[int]]
    count: int | list[int]
    max_model_len: int
    token_strs: list[str | list[str]] | msgspec.UnsetType = msgspec.UNSET


class Detokenize(msgspec.Struct, forbid_unknown_fields=True):
    """tokens: a list of ids, or a list of such lists, which gives a list of texts."""

    tokens: list[int | list[int]]
    model: str | None = None
    skip_special_tokens: bool = True


class Text(msgspec.Struct):
    text: str | list[str]


class ParseFunctionCall(msgspec.Struct, forbid_unknown_fields=True):
    """tools: as in /v1/chat/completions. tool_call_parser: a format's name, by default the model's."""

    text: str
    tools: list[dict[str, Any]] = []
    tool_call_parser: str | None = None


class ParsedCalls(msgspec.Struct):
    """Each call with its index, name, and arguments as JSON."""

    normal_text: str
    calls: list[ToolCallItem]


class SeparateReasoning(msgspec.Struct, forbid_unknown_fields=True):
    """reasoning_parser: how the model marks its reasoning; "auto": by any known mark in the text."""

    text: str
    reasoning_parser: str = AUTO


class SeparatedReasoning(msgspec.Struct):
    text: str
    reasoning_text: str


_PROMPT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_TOKENIZE = Operation(
    "The ids of a text or a conversation", body_schema(Tokenize, types={"prompt": _PROMPT}), Tokens
)
_SEPARATE = Operation(
    "Separate the reasoning from the answer in a text", SeparateReasoning, SeparatedReasoning
)
_PARSE = Operation("Extract the tool calls from a text", ParseFunctionCall, ParsedCalls)


class Texts(RouteGroup):
    @serves(_TOKENIZE, "POST /tokenize", "POST /v1/tokenize")
    async def tokenize(self, request: Request) -> Tokens:
        return await self._ctx.admit(request, Tokenize, self._tokenized, encodes=True)

    @serves(Operation("The text of ids", Detokenize, Text), "POST /detokenize", "POST /v1/detokenize")
    async def detokenize(self, request: Request) -> Text:
        return await self._ctx.admit(request, Detokenize, self._to_text, encodes=True)

    def _tokenized(self, body: Tokenize) -> Tokens:
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("either prompt or messages is needed, and not both", where="prompt")
        if body.messages is not None:
            return self._tokens(body, self._of_messages(body, body.messages))
        texts = _texts(body.prompt, self._ctx.config.max_batch_items)
        encode = self._ctx.manager.tokenizer.encode
        tokens = [self._tokens(body, encode(text, body.add_special_tokens)) for text in texts]
        if isinstance(body.prompt, str):
            return tokens[0]
        strings: Any = [one.token_strs for one in tokens] if body.return_token_strs else msgspec.UNSET
        ids: Any = [one.tokens for one in tokens]
        counts: Any = [one.count for one in tokens]
        return Tokens(ids, counts, self._ctx.model.context_length, strings)

    def _of_messages(self, body: Tokenize, messages: list[dict[str, Any]]) -> list[int]:
        request = GenerateReqInput(
            messages=conversation(
                messages_of(messages),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
            ),
            tools=tools_of(body.tools, body.tool_choice),
            template_kwargs=body.chat_template_kwargs,
        )
        return self._ctx.manager.prompt_ids(request)

    def _tokens(self, body: Tokenize, ids: list[Any]) -> Tokens:
        decode, strings = self._ctx.manager.tokenizer.decode, cast("Any", msgspec.UNSET)
        if body.return_token_strs:
            strings = [decode([one], False) for one in ids]
        return Tokens(ids, len(ids), self._ctx.model.context_length, strings)

    def _to_text(self, body: Detokenize) -> Text:
        tokens = body.tokens
        if tokens and all(isinstance(ids, list) for ids in tokens):
            lists = [ids for ids in tokens if isinstance(ids, list)]
            return Text([self._decoded(body, ids, f"tokens[{at}]") for at, ids in enumerate(lists)])
        return Text(self._decoded(body, tokens, "tokens"))

    def _decoded(self, body: Detokenize, ids: list[Any], path: str) -> str:
        vocab = self._ctx.model.vocab_size
        for index, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab:
                raise BadRequest(
                    f"must be a token id from 0 to {vocab - 1}, got {str(token)[:40]}",
                    where=f"{path}[{index}]",
                )
        return self._ctx.manager.tokenizer.decode(ids, body.skip_special_tokens)

    @serves(_SEPARATE, "POST /separate_reasoning")
    async def separate(self, request: Request) -> SeparatedReasoning:
        return await self._ctx.admit(request, SeparateReasoning, self._separated, encodes=True)

    def _separated(self, body: SeparateReasoning) -> SeparatedReasoning:
        _check_size(body.text, "text", MOST_TO_PARSE, None)
        try:
            split = split_reasoning(body.text, reasoning_type(body.reasoning_parser))
        except UnknownName as error:
            raise BadRequest(str(error), where="reasoning_parser") from error
        return SeparatedReasoning(split.answer, split.reasoning)

    @serves(_PARSE, "POST /parse_function_call")
    async def parse(self, request: Request) -> ParsedCalls:
        return await self._ctx.admit(request, ParseFunctionCall, self._parsed, encodes=True)

    def _parsed(self, body: ParseFunctionCall) -> ParsedCalls:
        key = body.tool_call_parser or self._ctx.model.tool_parser
        if key is None:
            reason = self._ctx.model.tool_parser_reason or "the model has none"
            raise BadRequest(f"is needed: {reason}", where="tool_call_parser")
        _check_size(body.text, "text", MOST_TO_PARSE, None)
        try:
            parser = FunctionCallParser(body.tools, key)
        except ValueError as error:
            field = "tool_call_parser" if "tool_call_parser" in str(error) else "tools"
            raise BadRequest(str(error), where=field) from error
        return ParsedCalls(*parser.parse_non_stream(body.text))


def _texts(prompt: Any, most: int) -> list[str]:
    if isinstance(prompt, str):
        _check_size(prompt, "prompt")
        return [prompt]
    prompts: list[str] = expect(prompt, list, "prompt", "must be a string or a list of strings")
    if len(prompts) > most:
        raise BadRequest(f"{len(prompts)} prompts in one request; at most {most}", where="prompt")
    for index, text in enumerate(prompts):
        _check_size(expect(text, str, f"prompt[{index}]", "must be a string"), f"prompt[{index}]")
    return prompts


def _check_size(text: str, path: str, most: int = MOST_TO_TOKENIZE, hint: str | None = "send parts") -> None:
    if len(text) > most:
        raise BadRequest(f"has {len(text)} characters; at most {most}", where=path, hint=hint)
