"""GET /v1/models and /v1/models/{id}: the one model that is served."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.server.context import ServerContext
from runtime.server.http.errors import ModelNotFound, json_response
from runtime.server.http.openapi import Operation


class ModelCard(msgspec.Struct):
    """max_model_len: prompt and reply together, in tokens."""

    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "sglang-dsl"
    parent: str | None = None


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


OPENAPI = {
    "GET /v1/models": Operation("the model that is served", response=ModelList, tag="openai"),
    "GET /v1/models/{model}": Operation("one model's card", response=ModelCard, tag="openai"),
}


def routes(ctx: ServerContext) -> list[Route]:
    created = int(ctx.clock())

    def card() -> ModelCard:
        return ModelCard(ctx.served_name, created, ctx.model.path, ctx.model.context_length)

    async def models(_: Request) -> Response:
        return json_response(ModelList([card()]))

    async def model(request: Request) -> Response:
        name: Any = request.path_params["model"]
        if name not in (ctx.served_name, ctx.model.path):
            raise ModelNotFound(f"the model {name[:200]!r} does not exist", where="model")
        return json_response(card())

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
    ]
