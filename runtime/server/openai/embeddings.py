"""POST /v1/embeddings: vectors of texts or ids, as numbers or in base64."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Literal

import msgspec
from starlette.requests import Request

from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.server.context import RouteGroup, ServerContext, serves
from runtime.server.http.errors import mapped_errors
from runtime.server.http.sse import while_connected
from runtime.server.openai.params import DEFAULT_MODEL, check_model, openai_operation, prompts_of
from runtime.server.replies import embed


class EmbeddingRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """encoding_format "base64": little-endian float32. dimensions: the vector's first so many, of length 1
    again. `user` has no effect."""

    input: str | list[str | int | list[int]]
    model: str = DEFAULT_MODEL
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    rid: str | None = None
    timeout_s: float | None = None


class Embedding(msgspec.Struct):
    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
    object: str = "list"


_EMBEDDINGS = openai_operation("Embeddings", request=EmbeddingRequest, response=EmbeddingList)
_NAMES = {"text": "input", "input_ids": "input"}


class Embeddings(RouteGroup):
    @serves(_EMBEDDINGS, "POST /v1/embeddings")
    async def embeddings(self, request: Request) -> EmbeddingList:
        ctx = self._ctx
        body, req = await ctx.admit(request, EmbeddingRequest, lambda body: (body, _request(ctx, body)))
        return await while_connected(request, _answer(ctx, body, req))


def _request(ctx: ServerContext, body: EmbeddingRequest) -> EmbeddingReqInput:
    adapter = check_model(ctx, body.model)
    fields = {name: value for name in ("dimensions", "cache_salt", "priority", "rid", "timeout_s")
              if (value := getattr(body, name)) is not None}  # fmt: skip
    with mapped_errors(_NAMES):
        return ctx.normalized(
            EmbeddingReqInput(**prompts_of(body.input, "input"), lora_path=adapter, **fields)
        )


async def _answer(ctx: ServerContext, body: EmbeddingRequest, req: EmbeddingReqInput) -> EmbeddingList:
    outputs = await embed(ctx, req, _NAMES)
    data = [
        Embedding(index, _encoded(output.embedding, body.encoding_format))
        for index, output in enumerate(outputs)
    ]
    prompt = sum(output.prompt_tokens for output in outputs)
    return EmbeddingList(data, ctx.served_name, EmbeddingUsage(prompt, prompt))


def _encoded(vector: Sequence[float], form: str) -> list[float] | str:
    if form == "float":
        return list(vector)
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
