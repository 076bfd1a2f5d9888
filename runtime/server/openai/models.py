"""GET /v1/models and /v1/models/{id}: the one model that is served, under each of its names, and with its
adapters.
"""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request

from runtime.protocol.control import GetStateReq
from runtime.protocol.errors import ModelNotFound
from runtime.server.context import RouteGroup, ServerContext, serves
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


_about = partial(Operation, tag="openai", errors=(504,))


class Models(RouteGroup):
    def __init__(self, ctx: ServerContext) -> None:
        super().__init__(ctx)
        self._created = int(ctx.clock())

    @serves(_about("The served model, alone and with each adapter", None, ModelList), "GET /v1/models")
    async def models(self, request: Request) -> ModelList:
        ctx, created, length = self._ctx, self._created, self._ctx.model.context_length
        adapters: dict[str, str] = {}
        if ctx.model.takes_adapters:
            adapters = (await ctx.control(GetStateReq())).data["lora_adapters"]
        cards = [ModelCard(name, created, ctx.model.path, length) for name in ctx.served_names]
        for name in ctx.served_names:
            for adapter, path in adapters.items():
                cards.append(ModelCard(f"{name}:{adapter}", created, path, length, parent=name))
        return ModelList(cards)

    @serves(_about("Information about a model", None, ModelCard), "GET /v1/models/{model:path}")
    async def model(self, request: Request) -> ModelCard:
        ctx, name = self._ctx, str(request.path_params["model"])
        cards = {one.id: one for one in (await self.models(request)).data}
        cards[ctx.model.path] = cards[ctx.served_name]
        if name not in cards and ctx.config.any_model_name:
            return msgspec.structs.replace(cards[ctx.served_name], id=name)
        if name not in cards:
            raise ModelNotFound(f"the model {name[:200]!r} does not exist", where="model")
        return cards[name]
