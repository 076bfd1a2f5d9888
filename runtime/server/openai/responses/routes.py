"""/v1/responses: OpenAI's Responses interface: create (whole, streamed, or in the background), look up,
cancel, delete.

Responses are kept in this process's memory, the newest MAX_KEPT of them; with several HTTP workers each knows
its own only. It knows items and events; prompts, templates and tokens are the frontend's.
"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.protocol.errors import BadRequest
from runtime.server.context import ServerContext
from runtime.server.http.body import read_struct
from runtime.server.http.errors import NotSupported, json_response
from runtime.server.http.openapi import Operation
from runtime.server.openai.responses.job import Job
from runtime.server.openai.responses.types import Deleted, ResponseObject, ResponsesRequest, Store

_ID = {"response_id": {"type": "string"}}
OPENAPI = {
    "POST /v1/responses": Operation(
        "reply to items (OpenAI's Responses)",
        request=ResponsesRequest,
        response=ResponseObject,
        stream=True,
        errors=(404, 501, 504),
        tag="openai",
    ),
    "GET /v1/responses/{response_id}": Operation(
        "a response that was kept", response=ResponseObject, path=_ID, tag="openai"
    ),
    "DELETE /v1/responses/{response_id}": Operation(
        "forget a response", response=Deleted, path=_ID, tag="openai"
    ),
    "POST /v1/responses/{response_id}/cancel": Operation(
        "cancel a response in the background", response=ResponseObject, errors=(400,), path=_ID, tag="openai"
    ),
}


def routes(ctx: ServerContext) -> list[Route]:
    made = _Routes(ctx)
    return [
        Route("/v1/responses", made.create, methods=["POST"]),
        Route("/v1/responses/{response_id}", made.read, methods=["GET"]),
        Route("/v1/responses/{response_id}", made.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/cancel", made.cancel, methods=["POST"]),
    ]


class _Routes:
    def __init__(self, ctx: ServerContext) -> None:
        self._ctx, self._store = ctx, Store()

    async def create(self, request: Request) -> Response:
        body = await read_struct(request, self._ctx.config, ResponsesRequest)
        job = Job(self._ctx, body, self._store)
        if body.background:
            return json_response(job.begin())
        if body.stream:
            return self._ctx.event_stream(job.stream(), job.failed_event)
        return json_response(await self._ctx.while_connected(request, job.whole()))

    async def read(self, request: Request) -> Response:
        kept = self._store.get(request.path_params["response_id"])
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise NotSupported("a kept response is not streamed", where="stream", hint="ask without stream")
        return json_response(kept.response)

    async def delete(self, request: Request) -> Response:
        identity = request.path_params["response_id"]
        kept = self._store.get(identity)
        if kept.task is not None:
            kept.task.cancel()
        del self._store.kept[identity]
        return json_response(Deleted(identity))

    async def cancel(self, request: Request) -> Response:
        kept = self._store.get(request.path_params["response_id"])
        if not kept.response.background:
            raise BadRequest("only a response in the background can be cancelled", where="response_id")
        if kept.task is not None and not kept.task.done():
            kept.task.cancel()
            await asyncio.wait({kept.task}, timeout=self._ctx.config.control_timeout_s)
            if kept.response.status == "queued":
                kept.response.status = "cancelled"  # before its work had begun
        return json_response(kept.response)
