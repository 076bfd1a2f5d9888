"""POST /v1/embeddings: vectors of texts or ids, as numbers or in base64."""

from __future__ import annotations

import base64
import struct
from typing import Literal

import msgspec
from starlette.requests import Request

from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.server.context import RouteGroup, serves
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


_SAME = ("dimensions", "cache_salt", "rid", "timeout_s")
_NAMES = {"text": "input", "input_ids": "input"}


class Embeddings(RouteGroup):
    @serves(openai_operation("Embeddings", EmbeddingRequest, EmbeddingList), "POST /v1/embeddings")
    async def embeddings(self, request: Request) -> EmbeddingList:
        body, req = await self._ctx.admit(request, EmbeddingRequest, self._request)
        outputs = await while_connected(request, embed(self._ctx, req, _NAMES))
        data = []
        for index, output in enumerate(outputs):
            vector: list[float] | str = output.embedding
            if body.encoding_format == "base64":
                vector = base64.b64encode(struct.pack(f"<{len(vector)}f", *output.embedding)).decode()
            data.append(Embedding(index, vector))
        prompt = sum(output.prompt_tokens for output in outputs)
        return EmbeddingList(data, self._ctx.served_name, EmbeddingUsage(prompt, prompt))

    def _request(self, body: EmbeddingRequest) -> tuple[EmbeddingRequest, EmbeddingReqInput]:
        adapter = check_model(self._ctx, body.model)
        fields = {name: getattr(body, name) for name in _SAME} | {"priority": body.priority or 0}
        with mapped_errors(_NAMES):
            request = EmbeddingReqInput(**prompts_of(body.input, "input"), lora_path=adapter, **fields)
            return body, self._ctx.normalized(request)
