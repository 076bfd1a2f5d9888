"""/v1/responses: OpenAI's Responses interface: create (whole, streamed, or in the background), look up,
cancel, delete.

Responses are kept in this process's memory, the newest MAX_KEPT of them; what another HTTP worker keeps is
asked for there. It knows items and events; prompts, templates and tokens are the frontend's.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.protocol.errors import BadRequest, NotSupported
from runtime.server.context import ServerContext
from runtime.server.http.body import to_struct
from runtime.server.http.errors import json_response
from runtime.server.http.openapi import Operation
from runtime.server.openai.responses.job import Job
from runtime.server.openai.responses.types import (
    Deleted,
    InputItems,
    Kept,
    ResponseObject,
    ResponsesRequest,
    Store,
    no_response,
)

MAX_ITEMS = 100
"""In one answer."""
_ID = {"response_id": {"type": "string"}}
OPENAPI = {
    "POST /v1/responses": Operation(
        "Create a response (OpenAI Responses API)",
        request=ResponsesRequest,
        response=ResponseObject,
        stream=True,
        errors=(404, 501, 504),
        tag="openai",
    ),
    "GET /v1/responses/{response_id}": Operation(
        "A stored response", response=ResponseObject, path=_ID, tag="openai"
    ),
    "DELETE /v1/responses/{response_id}": Operation(
        "Delete a stored response", response=Deleted, path=_ID, tag="openai"
    ),
    "GET /v1/responses/{response_id}/input_items": Operation(
        "The input items of a response",
        response=InputItems,
        errors=(400,),
        path=_ID,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS},
            "order": {"enum": ["asc", "desc"]},
            "after": {"type": "string"},
        },
        tag="openai",
    ),
    "POST /v1/responses/{response_id}/cancel": Operation(
        "Cancel a background response", response=ResponseObject, errors=(400,), path=_ID, tag="openai"
    ),
}


def routes(ctx: ServerContext) -> list[Route]:
    made = _Routes(ctx)
    return [
        Route("/v1/responses", made.create, methods=["POST"]),
        Route("/v1/responses/{response_id}", made.read, methods=["GET"]),
        Route("/v1/responses/{response_id}", made.delete, methods=["DELETE"]),
        Route("/v1/responses/{response_id}/input_items", made.input_items, methods=["GET"]),
        Route("/v1/responses/{response_id}/cancel", made.cancel, methods=["POST"]),
    ]


class _Routes:
    def __init__(self, ctx: ServerContext) -> None:
        self._ctx, self._store = ctx, Store(ctx.config, self._count)
        ctx.peers.answers |= {
            "response": self._kept,
            "delete_response": self._delete,
            "cancel_response": self._cancel,
        }

    async def create(self, request: Request) -> Response:
        body, earlier = await self._ctx.read(request, ResponsesRequest), None
        if isinstance(before := body.data.get("previous_response_id"), str):
            earlier = await self._find(before)
        job = await self._ctx.made(body, lambda data: self._job(data, earlier))
        if job.response.background:
            return json_response(job.begin())
        if job.streams:
            return self._ctx.event_stream(job.stream(), job.failed_event)
        return json_response(await self._ctx.while_connected(request, job.whole()))

    def _job(self, data: dict[str, Any], earlier: Kept | None) -> Job:
        return Job(self._ctx, to_struct(data, ResponsesRequest), self._store, earlier)

    async def read(self, request: Request) -> Response:
        identity = request.path_params["response_id"]
        kept = await self._own(identity)
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise NotSupported(
                "a stored response cannot be streamed", where="stream", hint="leave out stream"
            )
        return json_response(kept.response)

    async def input_items(self, request: Request) -> Response:
        identity = request.path_params["response_id"]
        items = list((await self._own(identity)).items)
        asked = request.query_params
        order, limit = asked.get("order", "desc"), asked.get("limit", "20")
        if order not in ("asc", "desc"):
            raise BadRequest('must be "asc" or "desc"', where="order")
        if not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= MAX_ITEMS):
            raise BadRequest(f"must be a number from 1 to {MAX_ITEMS}", where="limit")
        if order == "desc":
            items.reverse()
        if (after := asked.get("after")) is not None:
            places = [index for index, item in enumerate(items) if item["id"] == after]
            if not places:
                raise BadRequest("is not an item of this response", where="after")
            items = items[places[0] + 1 :]
        shown = items[: int(limit)]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        return json_response(InputItems(shown, first, last, len(shown) < len(items)))

    async def delete(self, request: Request) -> Response:
        identity = request.path_params["response_id"]
        await self._own(identity)
        deleted = self._delete(identity) or await self._ctx.peers.first("delete_response", identity, Deleted)
        if deleted is None:
            raise no_response(identity)
        return json_response(deleted)

    async def cancel(self, request: Request) -> Response:
        identity = request.path_params["response_id"]
        await self._own(identity)
        found = await self._cancel(identity)
        found = found or await self._ctx.peers.first("cancel_response", identity, ResponseObject)
        if found is None:
            raise no_response(identity)
        if not found.background:
            raise BadRequest("only a background response can be cancelled", where="response_id")
        return json_response(found)

    async def _find(self, identity: str) -> Kept | None:
        """The response, wherever it is kept, if it is the client's own."""
        kept = self._store.find(identity) or await self._ctx.peers.first("response", identity, Kept)
        return kept if kept is not None and kept.is_own else None

    async def _own(self, identity: str) -> Kept:
        """Raises NotFound where there is none, or another client's."""
        kept = await self._find(identity)
        if kept is None:
            raise no_response(identity)
        return kept

    def _count(self, count: int, size: int) -> None:
        gauges = self._ctx.metrics.kept
        gauges["num_kept_responses"].set(count)
        gauges["kept_response_bytes"].set(size)

    def _kept(self, identity: str) -> Kept | None:
        """For another worker; who works on it stays here."""
        kept = self._store.find(identity)
        return None if kept is None else dataclasses.replace(kept, task=None)

    def _delete(self, identity: str) -> Deleted | None:
        """None where it is not here."""
        return None if self._store.pop(identity) is None else Deleted(identity)

    async def _cancel(self, identity: str) -> ResponseObject | None:
        """The response as it is then; None where it is not here."""
        kept = self._store.find(identity)
        if kept is None:
            return None
        if kept.response.background and kept.task is not None and not kept.task.done():
            kept.task.cancel()
            await asyncio.wait({kept.task}, timeout=self._ctx.config.control_timeout_s)
            if kept.response.status == "queued":
                kept.response.status = "cancelled"  # before its work had begun
        return kept.response
