"""/v1/responses: OpenAI's Responses interface: create (whole, streamed, or in the background), read, cancel,
delete. Responses are stored in this process's memory; those of other HTTP workers are requested from them.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from starlette.requests import Request

from runtime.protocol.errors import BadRequest, NotSupported
from runtime.server.context import RouteGroup, ServerContext, serves
from runtime.server.http.body import to_struct
from runtime.server.http.openapi import Operation
from runtime.server.openai.params import openai_operation
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
_PAGES = {
    "limit": {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS},
    "order": {"enum": ["asc", "desc"]},
    "after": {"type": "string"},
}
_PATH = "/v1/responses/{response_id}"
_CREATE = openai_operation(
    "Create a response (OpenAI Responses API)", ResponsesRequest, ResponseObject, stream=True
)


def _stored(summary: str, response: Any, **more: Any) -> Operation:
    return Operation(summary, response=response, path=_ID, tag="openai", **more)


class Responses(RouteGroup):
    def __init__(self, ctx: ServerContext) -> None:
        super().__init__(ctx)
        self._store = Store(ctx.config, self._count)
        ctx.peers.answers |= {
            "response": self._kept,
            "delete_response": self._delete,
            "cancel_response": self._cancel,
        }

    @serves(_CREATE, "POST /v1/responses")
    async def create(self, request: Request) -> Any:
        body, earlier = await self._ctx.read(request, ResponsesRequest), None
        if isinstance(before := body.data.get("previous_response_id"), str):
            earlier = await self._find(before)
        job = await self._ctx.build(
            body, lambda data: Job(self._ctx, to_struct(data, ResponsesRequest), self._store, earlier)
        )
        if job.response.background:
            return job.begin()
        return await self._ctx.reply(request, job, job.failed_event)

    @serves(_stored("A stored response", ResponseObject), f"GET {_PATH}")
    async def read(self, request: Request) -> ResponseObject:
        kept = await self._of_client(request)
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise NotSupported(
                "a stored response cannot be streamed", where="stream", hint="leave out stream"
            )
        return kept.response

    @serves(
        _stored("The input items of a response", InputItems, errors=(400,), query=_PAGES),
        f"GET {_PATH}/input_items",
    )
    async def input_items(self, request: Request) -> InputItems:
        items, query = list((await self._of_client(request)).items), request.query_params
        order, limit = query.get("order", "desc"), query.get("limit", "20")
        if order not in ("asc", "desc"):
            raise BadRequest('must be "asc" or "desc"', where="order")
        if len(limit) > 9 or not (limit.isascii() and limit.isdigit() and 1 <= int(limit) <= MAX_ITEMS):
            raise BadRequest(f"must be a number from 1 to {MAX_ITEMS}", where="limit")
        if order == "desc":
            items.reverse()
        if (after := query.get("after")) is not None:
            names = [item["id"] for item in items]
            if after not in names:
                raise BadRequest("is not an item of this response", where="after")
            items = items[names.index(after) + 1 :]
        shown = items[: int(limit)]
        first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
        return InputItems(shown, first, last, len(shown) < len(items))

    @serves(_stored("Delete a stored response", Deleted), f"DELETE {_PATH}")
    async def delete(self, request: Request) -> Deleted:
        identity = (await self._of_client(request)).response.id
        deleted = self._delete(identity) or await self._ctx.peers.first("delete_response", identity, Deleted)
        if deleted is None:
            raise no_response(identity)
        return deleted

    @serves(_stored("Cancel a background response", ResponseObject, errors=(400,)), f"POST {_PATH}/cancel")
    async def cancel(self, request: Request) -> ResponseObject:
        identity = (await self._of_client(request)).response.id
        response = await self._cancel(identity)
        response = response or await self._ctx.peers.first("cancel_response", identity, ResponseObject)
        if response is None:
            raise no_response(identity)
        if not response.background:
            raise BadRequest("only a background response can be cancelled", where="response_id")
        return response

    async def _find(self, identity: str) -> Kept | None:
        """The response, in whichever worker it is kept, if it is the client's own."""
        kept = self._store.find(identity) or await self._ctx.peers.first("response", identity, Kept)
        return kept if kept is not None and kept.is_of_client else None

    async def _of_client(self, request: Request) -> Kept:
        """The response of the request's path. Raises NotFound if there is none, or it is another client's."""
        identity = request.path_params["response_id"]
        kept = await self._find(identity)
        if kept is None:
            raise no_response(identity)
        return kept

    def _count(self, count: int, size: int) -> None:
        gauges = self._ctx.metrics.kept
        gauges["num_kept_responses"].set(count)
        gauges["kept_response_bytes"].set(size)

    def _kept(self, identity: str) -> Kept | None:
        """For another worker, without the task."""
        kept = self._store.find(identity)
        return None if kept is None else dataclasses.replace(kept, task=None)

    def _delete(self, identity: str) -> Deleted | None:
        """None if it is not here."""
        return None if self._store.pop(identity) is None else Deleted(identity)

    async def _cancel(self, identity: str) -> ResponseObject | None:
        """The response afterwards; None if it is not here."""
        kept = self._store.find(identity)
        if kept is None:
            return None
        if kept.response.background and kept.task is not None and not kept.task.done():
            kept.task.cancel()
            await asyncio.wait({kept.task}, timeout=self._ctx.config.control_timeout_s)
            if kept.response.status == "queued":
                kept.response.status = "cancelled"  # before its work had begun
        return kept.response
