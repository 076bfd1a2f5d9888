"""GET /v1/models and /v1/models/{id}: the one model that is served, under each of its names, and with its
adapters.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.protocol.control import GetStateReq
from runtime.protocol.errors import ModelNotFound
from runtime.server.context import ServerContext
from runtime.server.http.errors import json_response
from runtime.server.http.openapi import Operation


class ModelCard(msgspec.Struct):
    """max_model_len: prompt and reply together, in tokens. parent: of a model with an adapter, the model."""

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
    "GET /v1/models": Operation(
        "The served model, alone and with each adapter",
        response=ModelList,
        tag="openai",
        errors=(504,),
    ),
    "GET /v1/models/{model}": Operation(
        "Information about a model", response=ModelCard, tag="openai", errors=(504,)
    ),
}


def routes(ctx: ServerContext) -> list[Route]:
    created = int(ctx.clock())

    async def cards() -> list[ModelCard]:
        length = ctx.model.context_length
        adapters: dict[str, str] = {}
        if ctx.model.takes_adapters:
            answer = await ctx.manager.control_async(GetStateReq(), ctx.config.control_timeout_s)
            adapters = answer.data["lora_adapters"]
        return [
            *(ModelCard(name, created, ctx.model.path, length) for name in ctx.served_names),
            *(
                ModelCard(f"{name}:{one}", created, path, length, parent=name)
                for name in ctx.served_names
                for one, path in adapters.items()
            ),
        ]

    async def models(_: Request) -> Response:
        return json_response(ModelList(await cards()))

    async def model(request: Request) -> Response:
        name: Any = request.path_params["model"]
        found = {one.id: one for one in await cards()}
        found[ctx.model.path] = found[ctx.served_name]
        if name not in found and ctx.config.any_model_name:
            found[name] = msgspec.structs.replace(found[ctx.served_name], id=name)
        if name not in found:
            raise ModelNotFound(f"the model {name[:200]!r} does not exist", where="model")
        return json_response(found[name])

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
    ]
