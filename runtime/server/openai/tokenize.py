"""/tokenize and /detokenize: what the model would read for a text or a conversation, and back.

POST /tokenize {"prompt": "Hello"} -> {"tokens": [...], "count": 3, "max_model_len": 4096}
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from runtime.formats.chat.render import conversation
from runtime.protocol.errors import BadRequest
from runtime.protocol.requests.generate import GenerateReqInput
from runtime.server.context import RouteGroup, serves
from runtime.server.http.body import json_type
from runtime.server.http.openapi import Operation, body_schema
from runtime.server.openai.messages import messages_of, tools_of

MOST_TEXT = 4 << 20
"""Characters of one text to be tokenised, at most."""


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


_PROMPT = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_TOKENIZE = Operation(
    "The ids of a text or a conversation",
    request=body_schema(Tokenize, types={"prompt": _PROMPT}),
    response=Tokens,
)
_DETOKENIZE = Operation("The text of ids", request=Detokenize, response=Text)


class Tokenizing(RouteGroup):
    @serves(_TOKENIZE, "POST /tokenize", "POST /v1/tokenize")
    async def tokenize(self, request: Request) -> Tokens:
        return await self._ctx.admit(request, Tokenize, self._tokenized, encodes=True)

    @serves(_DETOKENIZE, "POST /detokenize", "POST /v1/detokenize")
    async def detokenize(self, request: Request) -> Text:
        return await self._ctx.admit(request, Detokenize, self._to_text, encodes=True)

    def _tokenized(self, body: Tokenize) -> Tokens:
        if (body.prompt is None) == (body.messages is None):
            raise BadRequest("either prompt or messages is needed, and not both", where="prompt")
        if body.messages is not None:
            return self._tokens(body, [self._of_messages(body, body.messages)], many=False)
        texts = _texts(body.prompt, self._ctx.config.max_batch_items)
        encode = self._ctx.manager.tokenizer.encode
        lists = [encode(text, body.add_special_tokens) for text in texts]
        return self._tokens(body, lists, many=isinstance(body.prompt, list))

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

    def _tokens(self, body: Tokenize, lists: list[list[int]], *, many: bool) -> Tokens:
        """The answer: lists of lists for `many` prompts, else those of the only one."""
        decode = self._ctx.manager.tokenizer.decode
        counts = [len(ids) for ids in lists]
        strings: Any = msgspec.UNSET
        if body.return_token_strs:
            strings = [[decode([one], False) for one in ids] for ids in lists]
            strings = strings if many else strings[0]
        ids: Any = lists if many else lists[0]
        return Tokens(ids, counts if many else counts[0], self._ctx.model.context_length, strings)

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


def _texts(prompt: Any, most: int) -> list[str]:
    if isinstance(prompt, str):
        _check_size(prompt, "prompt")
        return [prompt]
    if not isinstance(prompt, list):
        raise BadRequest(f"must be a string or a list of strings, got {json_type(prompt)}", where="prompt")
    if len(prompt) > most:
        raise BadRequest(f"{len(prompt)} prompts in one request; at most {most}", where="prompt")
    for index, text in enumerate(prompt):
        if not isinstance(text, str):
            raise BadRequest(f"must be a string, got {json_type(text)}", where=f"prompt[{index}]")
        _check_size(text, f"prompt[{index}]")
    return prompt


def _check_size(text: str, path: str) -> None:
    if len(text) > MOST_TEXT:
        raise BadRequest(f"has {len(text)} characters; at most {MOST_TEXT}", where=path, hint="send parts")
