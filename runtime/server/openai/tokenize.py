"""/tokenize and /detokenize: what the model would read for a text or a conversation, and back.

POST /tokenize {"prompt": "Hello"} -> {"tokens": [...], "count": 3, "max_model_len": 4096}
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.formats.chat.render import conversation
from runtime.protocol.errors import BadRequest
from runtime.protocol.requests.generate import GenerateReqInput
from runtime.server.context import ServerContext
from runtime.server.http.body import json_type
from runtime.server.http.errors import json_response
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
OPENAPI: dict[str, Operation] = {
    **{
        f"POST {path}": Operation(
            "The ids of a text or a conversation",
            request=body_schema(Tokenize, types={"prompt": _PROMPT}),
            response=Tokens,
        )
        for path in ("/tokenize", "/v1/tokenize")
    },
    **{
        f"POST {path}": Operation("The text of ids", request=Detokenize, response=Text)
        for path in ("/detokenize", "/v1/detokenize")
    },
}


def routes(ctx: ServerContext) -> list[Route]:
    tokens = TokenRoutes(ctx)
    return [
        *(Route(path, tokens.tokenize, methods=["POST"]) for path in ("/tokenize", "/v1/tokenize")),
        *(Route(path, tokens.detokenize, methods=["POST"]) for path in ("/detokenize", "/v1/detokenize")),
    ]


class TokenRoutes:
    def __init__(self, ctx: ServerContext) -> None:
        self._ctx = ctx

    async def tokenize(self, request: Request) -> Response:
        return json_response(await self._ctx.admit(request, Tokenize, self._tokenized, encodes=True))

    async def detokenize(self, request: Request) -> Response:
        return json_response(await self._ctx.admit(request, Detokenize, self._to_text, encodes=True))

    def _tokenized(self, asked: Tokenize) -> Tokens:
        if (asked.prompt is None) == (asked.messages is None):
            raise BadRequest("either prompt or messages is needed, and not both", where="prompt")
        if asked.messages is not None:
            return self._of_messages(asked, asked.messages)
        return self._of_texts(asked, _texts(asked.prompt, self._ctx.config.max_batch_items))

    def _of_texts(self, asked: Tokenize, texts: list[str]) -> Tokens:
        found = [self._ctx.manager.tokenizer.encode(text, asked.add_special_tokens) for text in texts]
        return self._tokens(asked, found if isinstance(asked.prompt, list) else found[0])

    def _of_messages(self, asked: Tokenize, messages: list[dict[str, Any]]) -> Tokens:
        made = conversation(
            messages_of(messages),
            add_generation_prompt=asked.add_generation_prompt,
            continue_final_message=asked.continue_final_message,
        )
        ids = self._ctx.manager.prompt_ids(
            GenerateReqInput(
                messages=made,
                tools=tools_of(asked.tools, asked.tool_choice),
                template_kwargs=asked.chat_template_kwargs,
            )
        )
        return self._tokens(asked, ids)

    def _tokens(self, asked: Tokenize, found: Any) -> Tokens:
        many = bool(found) and isinstance(found[0], list)
        many = many or isinstance(asked.prompt, list)
        tokenizer = self._ctx.manager.tokenizer
        strings: Any = msgspec.UNSET
        if asked.return_token_strs:
            strings = (
                [[tokenizer.decode([one], False) for one in ids] for ids in found]
                if many
                else [tokenizer.decode([one], False) for one in found]
            )
        count = [len(ids) for ids in found] if many else len(found)
        return Tokens(found, count, self._ctx.model.context_length, strings)

    def _to_text(self, asked: Detokenize) -> Text:
        vocab = self._ctx.model.vocab_size

        def one(ids: list[Any], where: str) -> str:
            for index, token in enumerate(ids):
                if type(token) is not int or not 0 <= token < vocab:
                    raise BadRequest(
                        f"must be a token id from 0 to {vocab - 1}, got {str(token)[:40]}",
                        where=f"{where}[{index}]",
                    )
            return self._ctx.manager.tokenizer.decode(ids, asked.skip_special_tokens)

        tokens = asked.tokens
        if tokens and all(isinstance(ids, list) for ids in tokens):
            return Text([one(ids, f"tokens[{at}]") for at, ids in enumerate(tokens) if isinstance(ids, list)])
        return Text(one(tokens, "tokens"))


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


def _check_size(text: str, where: str) -> None:
    if len(text) > MOST_TEXT:
        raise BadRequest(f"has {len(text)} characters; at most {MOST_TEXT}", where=where, hint="send parts")
