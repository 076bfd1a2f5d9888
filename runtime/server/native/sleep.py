"""Sleep and wake: release the memory of the KV pool and of the weights for a while, with vLLM's and sglang's
routes.

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

from runtime.protocol.control import HealthReq, MemoryPart, ReleaseMemoryReq, ResumeMemoryReq
from runtime.protocol.errors import BadRequest, ModelLoadError
from runtime.protocol.request_base import SingleReq
from runtime.server.context import RouteGroup, serves
from runtime.server.http.openapi import Operation
from runtime.server.native.control import MAX_WAIT_S, Done, seconds

PARTS: tuple[MemoryPart, ...] = ("kv_cache", "weights")
LEVELS: dict[str, tuple[MemoryPart, ...]] = {"1": ("kv_cache",), "2": PARTS}
WAIT_S = 30.0
"""How long running requests are waited for by default."""


class Memory(msgspec.Struct, forbid_unknown_fields=True):
    """tags: kv_cache, weights; left out: both. cuda_graph, a third one of sglang's, goes with either."""

    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None


class Sleeping(msgspec.Struct):
    is_sleeping: bool


_WAIT = {"timeout": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S, "default": WAIT_S}}
_TAGS = {"type": "array", "items": {"enum": list(PARTS)}}
_QUERY = {"level": {"enum": [1, 2]}, "mode": {"enum": ["wait", "abort"]}, **_WAIT}
_ERRORS = (400, 501, 504)


class Sleep(RouteGroup):
    @serves(
        Operation(
            "Release the memory of the KV cache; level 2: also of the weights",
            response=Done,
            errors=_ERRORS,
            query=_QUERY,
        ),
        "POST /sleep",
    )
    async def sleep(self, request: Request) -> Done:
        level = _one_of(request, "level", LEVELS)
        mode = _one_of(request, "mode", ("wait", "abort"))
        wait = seconds(request, "timeout", MAX_WAIT_S, WAIT_S)
        order = ReleaseMemoryReq(parts=LEVELS[level], abort=mode == "abort", timeout_s=wait)
        return await self._done(order, wait)

    @serves(
        Operation("Take the memory back", response=Done, errors=_ERRORS, query={"tags": _TAGS}),
        "POST /wake_up",
    )
    async def wake_up(self, request: Request) -> Done:
        tags = request.query_params.getlist("tags")
        if unknown := [tag for tag in tags if tag not in PARTS]:
            raise BadRequest(f"must be of {', '.join(PARTS)}, got {unknown[0][:40]!r}", where="tags")
        parts = tuple(part for part in PARTS if part in tags or not tags)
        return await self._done(ResumeMemoryReq(parts=parts), MAX_WAIT_S)

    @serves(Operation("Whether memory is released", response=Sleeping, errors=(504,)), "GET /is_sleeping")
    async def is_sleeping(self, request: Request) -> Sleeping:
        return Sleeping(bool((await self._ctx.control(HealthReq())).data.get("released")))

    @serves(
        Operation(
            "Release the memory of KV cache or weights", request=Memory, response=Done, empty_ok=True,
            errors=_ERRORS,
        ),
        "POST /release_memory_occupation",
    )  # fmt: skip
    async def release(self, request: Request) -> Done:
        return await self._done(ReleaseMemoryReq(parts=await self._parts(request), timeout_s=WAIT_S), WAIT_S)

    @serves(
        Operation("Take the memory back", request=Memory, response=Done, empty_ok=True, errors=_ERRORS),
        "POST /resume_memory_occupation",
    )
    async def resume(self, request: Request) -> Done:
        return await self._done(ResumeMemoryReq(parts=await self._parts(request)), MAX_WAIT_S)

    async def _parts(self, request: Request) -> tuple[MemoryPart, ...]:
        body = await self._ctx.body(request, Memory, empty_ok=True)
        tags = PARTS if body.tags is None else body.tags
        if not (parts := tuple(part for part in PARTS if part in tags)):
            raise BadRequest(f"must name one of {', '.join(PARTS)}", where="tags")
        return parts

    async def _done(self, order: SingleReq, longer_s: float) -> Done:
        try:
            return Done.of(await self._ctx.control(order, longer_s))
        except ModelLoadError as error:
            raise BadRequest(f"the weights cannot be read again: {error}", where="tags") from error


def _one_of(request: Request, name: str, known: dict[str, tuple[MemoryPart, ...]] | tuple[str, ...]) -> str:
    """A query parameter, by default the first of `known`. Raises BadRequest."""
    first, *_ = known
    value = request.query_params.get(name, first)
    if value not in known:
        raise BadRequest(f"must be one of {', '.join(known)}, got {value[:40]!r}", where=name)
    return value
