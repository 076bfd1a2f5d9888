"""The native routes of orders to the engine whose bodies or answers differ from the verb's: cache, requests,
sessions, profile, settings, weights, memory. The other orders are in verbs.py. Routes of other servers that
this one does not have are answered with 501 and the reason.

Memory is released and taken back with vLLM's routes and sglang's:

    /sleep?level=1                      the KV pool; level 2: the weights, too
    /wake_up?tags=weights&tags=kv_cache all without tags
    /release_memory_occupation          {"tags": ["kv_cache", "weights"]}, all without
    /resume_memory_occupation           the same

Until all is back, requests are answered with 503, and so is /ready.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Collection
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from runtime.processes.frontend.client import CLIENT
from runtime.processes.supervise.logs import ACCESS
from runtime.protocol.constraint import Constraint
from runtime.protocol.control import (
    ControlOutput,
    FlushCacheReq,
    MemoryPart,
    OpenSessionReq,
    PrecompileReq,
    ProfileReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    SetStateReq,
    UpdateWeightsReq,
)
from runtime.protocol.errors import BadRequest, Forbidden, ModelLoadError, NoSuchService, from_dict
from runtime.protocol.io_struct import SingleReq
from runtime.server.context import RouteGroup, ServerContext, serves
from runtime.server.http.body import check_range
from runtime.server.http.errors import error_body
from runtime.server.http.openapi import Operation

MAX_WAIT_S = 600.0
LOG_LEVELS = ("debug", "info", "warning", "error")
PARTS: tuple[MemoryPart, ...] = ("kv_cache", "weights")
SLEEP_LEVELS: dict[str, tuple[MemoryPart, ...]] = {"1": ("kv_cache",), "2": PARTS}
SLEEP_WAIT_S = 30.0
"""How long running requests are waited for by default."""
_FOLDER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")

NOT_HERE: dict[str, str] = {
    **dict.fromkeys(
        (
            "/update_weights_from_distributed", "/update_weights_from_tensor",
            "/init_weights_update_group", "/destroy_weights_update_group", "/get_weights_by_name",
        ),
        "weights can only be loaded from files: /update_weights_from_disk",
    ),
    **dict.fromkeys(("/freeze_gc", "/slow_down"), "this server has no such setting"),
}  # fmt: skip
"""Paths of other servers -> why this one does not have them. Not in the OpenAPI document."""


class Abort(msgspec.Struct, forbid_unknown_fields=True):
    """rid: of one request, or of a batch whose items are rid_0, rid_1, ...; prefix: every request whose id
    begins with it; abort_all: every request."""

    rid: str | list[str] | None = None
    abort_all: bool = False
    prefix: bool = False


class _ClientAbort(msgspec.Struct):
    """Cancel these requests where `client` sent them."""

    rids: list[str]
    client: str


class OpenSession(msgspec.Struct, forbid_unknown_fields=True):
    """capacity_of_str_len: tokens of the session, 0 for the model's context; session_id: a name; timeout:
    seconds without use after which it is closed; streaming: every turn continues the last one, whose KV is
    kept."""

    capacity_of_str_len: int = 0
    session_id: str | None = None
    streaming: bool = False
    timeout: float | None = None


class StartProfile(msgspec.Struct, forbid_unknown_fields=True):
    """num_steps: stop after so many steps; output_dir: name of a new folder in the server's folder of
    profiles."""

    num_steps: int | None = None
    output_dir: str | None = None


class ConfigureLogging(msgspec.Struct, forbid_unknown_fields=True):
    """log_level: debug, info, warning or error; log_requests: one line for each HTTP request."""

    log_level: str | None = None
    log_requests: bool | None = None


class Precompile(msgspec.Struct, forbid_unknown_fields=True):
    """constraints: of kind regex, json_schema, ebnf, structural_tag or choices (a JSON list of texts).
    timeout: seconds to wait for them; unfinished ones continue."""

    constraints: list[Constraint]
    timeout: float | None = None


class Precompiled(msgspec.Struct):
    """Of one constraint. If ok: its backend, and why that one; whether it is exact, which keywords a
    validator checks or the standard ignores; the seconds of its compilation, and whether it was cached. Else
    error."""

    ok: bool
    backend: str | msgspec.UnsetType = msgspec.UNSET
    exact: bool | msgspec.UnsetType = msgspec.UNSET
    checked: list[str] | msgspec.UnsetType = msgspec.UNSET
    ignored: list[str] | msgspec.UnsetType = msgspec.UNSET
    why: str | msgspec.UnsetType = msgspec.UNSET
    compile_s: float | msgspec.UnsetType = msgspec.UNSET
    cached: bool | msgspec.UnsetType = msgspec.UNSET
    error: Any = msgspec.UNSET


class AllPrecompiled(msgspec.Struct):
    """In the order of the constraints."""

    constraints: list[Precompiled]


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    """model_path: a directory of this machine with a checkpoint of the same shape; abort_all_requests: cancel
    running requests, which are computed again otherwise. The cache is always flushed."""

    model_path: str
    abort_all_requests: bool = False
    flush_cache: bool = True
    load_format: str | None = None


class SetInternalState(msgspec.Struct, forbid_unknown_fields=True):
    """server_args: settings of the scheduler and their new values."""

    server_args: dict[str, Any]


class Memory(msgspec.Struct, forbid_unknown_fields=True):
    """tags: kv_cache, weights; left out: both. cuda_graph, a third one of sglang's, goes with either."""

    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None


class Done(msgspec.Struct):
    success: bool
    message: str = ""
    data: dict[str, Any] = {}

    @classmethod
    def of(cls, answer: ControlOutput) -> Done:
        return cls(True, answer.message, answer.data)


OF_REQUESTS = frozenset({"/abort_request"})
"""Orders of any client, besides the verbs that are not for the admin alone."""
_WAIT = {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S}
_SLEEP_QUERY = {
    "level": {"enum": [1, 2]}, "mode": {"enum": ["wait", "abort"]},
    "timeout": {**_WAIT, "default": SLEEP_WAIT_S},
}  # fmt: skip
_WAKE_QUERY = {"tags": {"type": "array", "items": {"enum": list(PARTS)}}}
_MEMORY_ERRORS = (400, 501, 504)


def _order(
    summary: str, request: Any = None, response: Any = Done, errors: tuple[int, ...] = (504,), **more: Any
) -> Operation:
    return Operation(summary, request=request, response=response, errors=errors, **more)


def _configure_logging(data: str) -> bool:
    """Apply a ConfigureLogging in JSON to this process."""
    options = msgspec.json.decode(data, type=ConfigureLogging)
    if options.log_level is not None:
        logging.getLogger("runtime").setLevel(options.log_level.upper())
    if options.log_requests is not None:
        logging.getLogger(ACCESS).disabled = not options.log_requests
    return True


class Control(RouteGroup):
    """Orders are POST alone: a link or a picture of any page makes a browser send GET."""

    def __init__(self, ctx: ServerContext) -> None:
        super().__init__(ctx)
        ctx.peers.answers["configure_logging"] = _configure_logging
        ctx.peers.answers["abort_request"] = self._abort_for_client

    def routes(self) -> list[Route]:
        """With the paths of NOT_HERE, which the document leaves out."""
        others = [Route(path, self._not_here, methods=["GET", "POST", "PUT"]) for path in NOT_HERE]
        return super().routes() + others

    async def _not_here(self, request: Request) -> Response:
        raise NoSuchService(NOT_HERE[request.url.path], where=request.url.path)

    @serves(
        _order(
            "Drop all cached prefixes", None, "text", (400, 504), query={"timeout": _WAIT}, plain_errors=True
        ),
        "POST /flush_cache",
    )
    async def flush(self, request: Request) -> Response:
        wait = seconds(request, "timeout", MAX_WAIT_S)
        patience = self._ctx.config.control_timeout_s + wait
        answer = await self._ctx.manager.control_async(FlushCacheReq(timeout_s=wait), patience)
        if answer.ok:
            return PlainTextResponse("The cache was flushed.\n")
        reason = answer.message.removeprefix("the cache was not flushed: ") or "requests are not finished"
        return PlainTextResponse(
            f"The cache was not flushed: {reason}. ?timeout=SECONDS waits for them.\n", 400
        )

    @serves(_order("Cancel requests", Abort, errors=()), "POST /abort_request")
    async def abort(self, request: Request) -> Done:
        body, client = await self._ctx.body(request, Abort), CLIENT.get()
        if client.is_tenant and (body.abort_all or body.prefix):
            raise Forbidden(
                "only the admin key is allowed to cancel the requests of others", where="abort_all / prefix"
            )
        manager = self._ctx.manager
        if body.abort_all:
            manager.abort(None)
            return Done(True)
        rids = [body.rid] if isinstance(body.rid, str) else body.rid or []
        if not rids or not all(rids):
            raise BadRequest("rid or abort_all is required", where="rid")
        if len(rids) > (most := self._ctx.config.max_batch_items):
            raise BadRequest(f"has {len(rids)} ids; at most {most}", where="rid", hint="max_batch_items")
        if client.is_tenant:
            order = msgspec.json.encode(_ClientAbort(rids, client.name)).decode()
            self._abort_for_client(order)
            await self._ctx.peers.all("abort_request", order, bool)
            return Done(True)
        for rid in rids:
            manager.abort(rid, prefix=body.prefix)
            if not body.prefix:
                manager.abort(f"{rid}_", prefix=True)
        return Done(True)

    def _abort_for_client(self, data: str) -> bool:
        """Cancel the requests of an _ClientAbort in JSON that this process waits for."""
        order = msgspec.json.decode(data, type=_ClientAbort)
        for rid in order.rids:
            self._ctx.manager.abort(rid, client=order.client)
            self._ctx.manager.abort(f"{rid}_", prefix=True, client=order.client)
        return True

    @serves(_order("Open a session; returns its id", OpenSession, str, empty_ok=True), "POST /open_session")
    async def open_session(self, request: Request) -> Any:
        body = await self._ctx.body(request, OpenSession, empty_ok=True)
        check_range(body.capacity_of_str_len, "capacity_of_str_len", 0)
        if body.timeout is not None and not 0 < body.timeout < math.inf:
            raise BadRequest(f"must be a positive number of seconds, got {body.timeout}", where="timeout")
        if body.session_id == "":
            raise BadRequest("is empty", where="session_id")
        order = OpenSessionReq(
            session_id=body.session_id,
            capacity=body.capacity_of_str_len,
            timeout_s=self._ctx.config.session_timeout_s if body.timeout is None else body.timeout,
            streaming=body.streaming,
            owner=CLIENT.get().owner,
        )
        return (await self._ctx.control(order)).data.get("session_id", body.session_id)

    @serves(_order("Start a profile", StartProfile, empty_ok=True), "POST /start_profile")
    async def start_profile(self, request: Request) -> Done:
        body = await self._ctx.body(request, StartProfile, empty_ok=True)
        check_range(body.num_steps, "num_steps", 1)
        if body.output_dir is not None and not _FOLDER_NAME.match(body.output_dir):
            # A client must not choose where on this machine files are written.
            raise BadRequest("must be a plain name of letters, digits, '.', '_' and '-'", where="output_dir")
        order = ProfileReq(action="start", steps=body.num_steps, folder=body.output_dir)
        return Done.of(await self._ctx.control(order))

    @serves(_order("Stop the profile", errors=(400, 504)), "POST /stop_profile")
    async def stop_profile(self, request: Request) -> Done:
        return Done.of(await self._ctx.control(ProfileReq(action="stop")))

    @serves(_order("Change the logging", ConfigureLogging, errors=()), "POST /configure_logging")
    async def configure_logging(self, request: Request) -> Done:
        body = await self._ctx.body(request, ConfigureLogging)
        if body.log_level not in (None, *LOG_LEVELS):
            raise BadRequest(f"must be one of {', '.join(LOG_LEVELS)}", where="log_level")
        data = msgspec.json.encode(body).decode()
        _configure_logging(data)
        await self._ctx.peers.all("configure_logging", data, bool)
        return Done(True)

    @serves(_order("Change settings of the scheduler", SetInternalState), "POST /set_internal_state")
    async def set_state(self, request: Request) -> Done:
        body = await self._ctx.body(request, SetInternalState)
        values = {name: value for name, value in body.server_args.items() if value is not None}
        return Done.of(await self._ctx.control(SetStateReq(values=values)))

    @serves(_order("Compile constraints in advance", Precompile, AllPrecompiled), "POST /precompile")
    async def precompile(self, request: Request) -> dict[str, Any]:
        body = await self._ctx.body(request, Precompile)
        wait = self._ctx.config.control_timeout_s if body.timeout is None else body.timeout
        if not 0 < wait <= MAX_WAIT_S:
            raise BadRequest(f"must be more than 0 and at most {MAX_WAIT_S:g} s, got {wait}", where="timeout")
        order = PrecompileReq(constraints=body.constraints, timeout_s=wait)
        data = (await self._ctx.control(order, wait)).data
        for one in data["constraints"]:
            if not one["ok"]:
                one["error"] = error_body(from_dict(one["error"]))["error"]
        return data

    @serves(_order("Load the weights of another checkpoint", UpdateWeights), "POST /update_weights_from_disk")
    async def update_weights(self, request: Request) -> Done:
        body = await self._ctx.body(request, UpdateWeights)
        if not body.flush_cache:
            raise BadRequest("must be true: KV of other weights cannot be reused", where="flush_cache")
        if body.load_format not in (None, "auto", "safetensors"):
            raise BadRequest(f"must be auto, got {body.load_format!r}", where="load_format")
        order = UpdateWeightsReq(model_path=body.model_path, abort_all=body.abort_all_requests)
        try:
            answer = await self._ctx.control(order, MAX_WAIT_S)
        except ModelLoadError as error:  # here the client has chosen it
            raise BadRequest(str(error), where="model_path") from error
        return Done(True, answer.message)

    # -- memory ----------------------------------------------------------------------------------------------

    @serves(
        _order(
            "Release the memory of the KV cache; level 2: also of the weights",
            errors=_MEMORY_ERRORS,
            query=_SLEEP_QUERY,
        ),
        "POST /sleep",
    )
    async def sleep(self, request: Request) -> Done:
        level = _one_of(request, "level", SLEEP_LEVELS)
        mode = _one_of(request, "mode", ("wait", "abort"))
        wait = seconds(request, "timeout", MAX_WAIT_S, SLEEP_WAIT_S)
        order = ReleaseMemoryReq(parts=SLEEP_LEVELS[level], abort=mode == "abort", timeout_s=wait)
        return await self._memory(order, wait)

    @serves(_order("Take the memory back", errors=_MEMORY_ERRORS, query=_WAKE_QUERY), "POST /wake_up")
    async def wake_up(self, request: Request) -> Done:
        tags = request.query_params.getlist("tags")
        if unknown := [tag for tag in tags if tag not in PARTS]:
            raise BadRequest(f"must be of {', '.join(PARTS)}, got {unknown[0][:40]!r}", where="tags")
        parts = tuple(part for part in PARTS if part in tags or not tags)
        return await self._memory(ResumeMemoryReq(parts=parts), MAX_WAIT_S)

    @serves(
        _order("Release the memory of KV cache or weights", Memory, errors=_MEMORY_ERRORS, empty_ok=True),
        "POST /release_memory_occupation",
    )
    async def release(self, request: Request) -> Done:
        order = ReleaseMemoryReq(parts=await self._parts(request), timeout_s=SLEEP_WAIT_S)
        return await self._memory(order, SLEEP_WAIT_S)

    @serves(
        _order("Take the memory back", Memory, errors=_MEMORY_ERRORS, empty_ok=True),
        "POST /resume_memory_occupation",
    )
    async def resume(self, request: Request) -> Done:
        return await self._memory(ResumeMemoryReq(parts=await self._parts(request)), MAX_WAIT_S)

    async def _parts(self, request: Request) -> tuple[MemoryPart, ...]:
        body = await self._ctx.body(request, Memory, empty_ok=True)
        tags = PARTS if body.tags is None else body.tags
        if not (parts := tuple(part for part in PARTS if part in tags)):
            raise BadRequest(f"must name one of {', '.join(PARTS)}", where="tags")
        return parts

    async def _memory(self, order: SingleReq, longer_s: float) -> Done:
        try:
            return Done.of(await self._ctx.control(order, longer_s))
        except ModelLoadError as error:
            raise BadRequest(f"the weights cannot be read again: {error}", where="tags") from error


def seconds(request: Request, name: str, most: float, without: float = 0.0) -> float:
    """A query parameter in seconds, by default `without`. Raises BadRequest."""
    text = request.query_params.get(name, str(without))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise BadRequest(f"must be a number of seconds from 0 to {most:g}, got {text[:40]!r}", where=name)
    return value


def _one_of(request: Request, name: str, known: Collection[str]) -> str:
    """A query parameter, by default the first of `known`. Raises BadRequest."""
    value = request.query_params.get(name, next(iter(known)))
    if value not in known:
        raise BadRequest(f"must be one of {', '.join(known)}, got {value[:40]!r}", where=name)
    return value
