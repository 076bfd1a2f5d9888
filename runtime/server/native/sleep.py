"""Sleep and wake: the memory of the KV pool and of the weights given back for a while, as vLLM's and sglang's
clients ask for it.

    /sleep?level=1                      the KV pool; level 2: the weights, too
    /wake_up?tags=weights&tags=kv_cache all without tags
    /release_memory_occupation          {"tags": ["kv_cache", "weights"]}, all without
    /resume_memory_occupation           the same

Until all is back, requests are answered with 503, and so is /ready.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.protocol.control import HealthReq, MemoryPart, ReleaseMemoryReq, ResumeMemoryReq
from runtime.protocol.errors import BadRequest, ModelLoadError
from runtime.protocol.request_base import SingleReq
from runtime.server.context import ServerContext
from runtime.server.http.errors import json_response
from runtime.server.http.openapi import Operation
from runtime.server.native.control import MAX_WAIT_S, Done, raise_if_refused, seconds

PARTS: tuple[MemoryPart, ...] = ("kv_cache", "weights")
LEVELS: dict[str, tuple[MemoryPart, ...]] = {"1": ("kv_cache",), "2": PARTS}
WAIT_S = 30.0
"""How long requests in hand are waited for, unless said otherwise."""


class Memory(msgspec.Struct, forbid_unknown_fields=True):
    """tags: kv_cache, weights; left out: both. cuda_graph, a third one of sglang's, goes with either."""

    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None


class Sleeping(msgspec.Struct):
    is_sleeping: bool


_WAIT = {"timeout": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S, "default": WAIT_S}}
_TAGS = {"type": "array", "items": {"enum": list(PARTS)}}
_ERRORS = (400, 501, 504)
OPENAPI: dict[str, Operation] = {
    "POST /sleep": Operation(
        "Release the memory of the KV cache; level 2: also of the weights",
        response=Done,
        errors=_ERRORS,
        query={"level": {"enum": [1, 2]}, "mode": {"enum": ["wait", "abort"]}, **_WAIT},
    ),
    "POST /wake_up": Operation("Take the memory back", response=Done, errors=_ERRORS, query={"tags": _TAGS}),
    "GET /is_sleeping": Operation("Whether memory is released", response=Sleeping, errors=(504,)),
    "POST /release_memory_occupation": Operation(
        "Release the memory of KV cache or weights", request=Memory, response=Done, empty_ok=True,
        errors=_ERRORS,
    ),
    "POST /resume_memory_occupation": Operation(
        "Take the memory back", request=Memory, response=Done, empty_ok=True, errors=_ERRORS
    ),
}  # fmt: skip


def routes(ctx: ServerContext) -> list[Route]:
    async def sleep(request: Request) -> Response:
        level = _one_of(request, "level", LEVELS)
        mode = _one_of(request, "mode", ("wait", "abort"))
        wait = seconds(request, "timeout", MAX_WAIT_S, WAIT_S)
        return await release(LEVELS[level], wait, abort=mode == "abort")

    async def wake_up(request: Request) -> Response:
        given = request.query_params.getlist("tags")
        if unknown := [tag for tag in given if tag not in PARTS]:
            raise BadRequest(f"must be of {', '.join(PARTS)}, got {unknown[0][:40]!r}", where="tags")
        return await resume([part for part in PARTS if part in given or not given])

    async def is_sleeping(request: Request) -> Response:
        answer = await ctx.manager.control_async(HealthReq(), ctx.config.control_timeout_s)
        return json_response(Sleeping(bool(answer.data.get("released"))))

    async def release_memory(request: Request) -> Response:
        return await release(await parts_of(request), WAIT_S, abort=False)

    async def resume_memory(request: Request) -> Response:
        return await resume(await parts_of(request))

    async def parts_of(request: Request) -> list[MemoryPart]:
        asked = await ctx.asked(request, Memory, empty_ok=True)
        tags = PARTS if asked.tags is None else asked.tags
        if not (parts := [part for part in PARTS if part in tags]):
            raise BadRequest(f"must name one of {', '.join(PARTS)}", where="tags")
        return parts

    async def release(parts: list[MemoryPart] | tuple[MemoryPart, ...], wait: float, abort: bool) -> Response:
        return await ask(ReleaseMemoryReq(parts=tuple(parts), abort=abort, timeout_s=wait), wait)

    async def resume(parts: list[MemoryPart]) -> Response:
        return await ask(ResumeMemoryReq(parts=tuple(parts)), MAX_WAIT_S)

    async def ask(order: SingleReq, longer: float) -> Response:
        answer = await ctx.manager.control_async(order, ctx.config.control_timeout_s + longer)
        try:
            raise_if_refused(answer)
        except ModelLoadError as error:
            raise BadRequest(f"the weights cannot be read again: {error}", where="tags") from error
        return json_response(Done(True, answer.message, answer.data))

    return [
        Route("/sleep", sleep, methods=["POST"]),
        Route("/wake_up", wake_up, methods=["POST"]),
        Route("/is_sleeping", is_sleeping, methods=["GET"]),
        Route("/release_memory_occupation", release_memory, methods=["POST"]),
        Route("/resume_memory_occupation", resume_memory, methods=["POST"]),
    ]


def _one_of(request: Request, name: str, known: dict[str, tuple[MemoryPart, ...]] | tuple[str, ...]) -> str:
    """A query parameter, the first of `known` where there is none. Raises BadRequest."""
    first, *_ = known
    given = request.query_params.get(name, first)
    if given not in known:
        raise BadRequest(f"must be one of {', '.join(known)}, got {given[:40]!r}", where=name)
    return given
