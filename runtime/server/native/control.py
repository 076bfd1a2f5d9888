"""The native routes that give orders to the engine and read or answer in a way of their own: cache, requests,
sessions, profile, settings, adapters, weights. The other orders are in verbs.py.

What the field's servers have and this one has not is answered with 501 and the reason.
"""

from __future__ import annotations

import logging
import math
import re
from typing import Any

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
    LoadLoRAAdapterReq,
    OpenSessionReq,
    PrecompileReq,
    ProfileReq,
    SetStateReq,
    UnloadLoRAAdapterReq,
    UpdateWeightsReq,
)
from runtime.protocol.errors import BadRequest, Forbidden, ModelLoadError, NoSuchService, from_dict
from runtime.protocol.io_struct import SingleReq
from runtime.server.context import ServerContext
from runtime.server.http.errors import error_body, json_response
from runtime.server.http.openapi import Operation

MAX_WAIT_S = 600.0
LEVELS = ("debug", "info", "warning", "error")
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
"""Paths that other servers of this kind answer, and why this one does not. The OpenAPI document, which lists
what the server does, leaves them out."""


class Abort(msgspec.Struct, forbid_unknown_fields=True):
    """rid: of one request, or of a batch whose items are rid_0, rid_1, ...; prefix: every request whose id
    begins with it; abort_all: every request."""

    rid: str | list[str] | None = None
    abort_all: bool = False
    prefix: bool = False


class _OwnAbort(msgspec.Struct):
    """Cancel these requests where `client` sent them."""

    rids: list[str]
    client: str


class OpenSession(msgspec.Struct, forbid_unknown_fields=True):
    """capacity_of_str_len: tokens the session may hold, 0 for as many as the model's context; session_id: a
    name of one's own; timeout: seconds without use after which it is closed; streaming: every turn goes on
    from the last one, whose KV is kept."""

    capacity_of_str_len: int = 0
    session_id: str | None = None
    streaming: bool = False
    timeout: float | None = None


class StartProfile(msgspec.Struct, forbid_unknown_fields=True):
    """num_steps: stop after so many steps; output_dir: the name of a folder, made in the server's folder of
    profiles."""

    num_steps: int | None = None
    output_dir: str | None = None


class ConfigureLogging(msgspec.Struct, forbid_unknown_fields=True):
    """log_level: debug, info, warning or error; log_requests: one line for each HTTP request."""

    log_level: str | None = None
    log_requests: bool | None = None


class Precompile(msgspec.Struct, forbid_unknown_fields=True):
    """constraints: what generations will have to match, each of kind regex, json_schema, ebnf, structural_tag
    or choices (a JSON list of texts). timeout: seconds to wait for them; what is not done then goes on."""

    constraints: list[Constraint]
    timeout: float | None = None


class Precompiled(msgspec.Struct):
    """Of one constraint. Where ok: who keeps it (backend, why), whether exactly, which keywords a validator
    checks or the standard ignores, the seconds its compilation took, and whether it was ready. Else error."""

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


class LoadLora(msgspec.Struct, forbid_unknown_fields=True):
    """lora_name: by which requests name it; lora_path: a directory of this machine with an adapter as peft
    writes it; pinned: once used, it stays on the device."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadLora(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str


class LoadedLoras(msgspec.Struct):
    """The directories of all adapters that are loaded now, by name."""

    loaded_adapters: dict[str, str]
    success: bool = True


class UpdateWeights(msgspec.Struct, forbid_unknown_fields=True):
    """model_path: a directory of this machine with a checkpoint of the same shape; abort_all_requests: cancel
    those in hand, which are computed again otherwise. The cache is always flushed."""

    model_path: str
    abort_all_requests: bool = False
    flush_cache: bool = True
    load_format: str | None = None


class SetInternalState(msgspec.Struct, forbid_unknown_fields=True):
    """server_args: settings of the scheduler and their new values."""

    server_args: dict[str, Any]


class Done(msgspec.Struct):
    success: bool
    message: str = ""
    data: dict[str, Any] = {}


_WAIT = {"timeout": {"type": "number", "minimum": 0, "maximum": MAX_WAIT_S}}
OPENAPI: dict[str, Operation] = {
    "POST /flush_cache": Operation(
        "Drop all cached prefixes", response="text", errors=(400, 504), query=_WAIT, plain_errors=True
    ),
    "POST /abort_request": Operation("Cancel requests", request=Abort, response=Done),
    "POST /open_session": Operation(
        "Open a session; returns its id", request=OpenSession, response=str, empty_ok=True, errors=(504,)
    ),
    "POST /start_profile": Operation(
        "Start a profile", request=StartProfile, response=Done, empty_ok=True, errors=(504,)
    ),
    "POST /stop_profile": Operation("Stop the profile", response=Done, errors=(400, 504)),
    "POST /configure_logging": Operation("Change the logging", request=ConfigureLogging, response=Done),
    "POST /precompile": Operation(
        "Compile constraints in advance", request=Precompile, response=AllPrecompiled, errors=(504,)
    ),
    "POST /load_lora_adapter": Operation(
        "Load a LoRA adapter", request=LoadLora, response=LoadedLoras, errors=(504,)
    ),
    "POST /unload_lora_adapter": Operation(
        "Unload a LoRA adapter", request=UnloadLora, response=LoadedLoras, errors=(404, 504)
    ),
    "POST /update_weights_from_disk": Operation(
        "Load the weights of another checkpoint", request=UpdateWeights, response=Done, errors=(504,)
    ),
    "POST /set_internal_state": Operation(
        "Change settings of the scheduler", request=SetInternalState, response=Done, errors=(504,)
    ),
}


OF_REQUESTS = frozenset({"/abort_request"})
"""What any client may do, besides the verbs that are not for the admin alone."""


def routes(ctx: ServerContext) -> list[Route]:
    control = Control(ctx)
    # Orders are POST alone: a link or a picture of any page makes a browser send GET.
    orders = {
        "/flush_cache": control.flush,
        "/abort_request": control.abort,
        "/open_session": control.open_session,
        "/start_profile": control.start_profile,
        "/stop_profile": control.stop_profile,
        "/configure_logging": control.configure_logging,
        "/precompile": control.precompile,
        "/load_lora_adapter": control.load_lora,
        "/unload_lora_adapter": control.unload_lora,
        "/update_weights_from_disk": control.update_weights,
        "/set_internal_state": control.set_state,
    }
    return [
        *(Route(path, order, methods=["POST"]) for path, order in orders.items()),
        *(Route(path, control.not_here, methods=["GET", "POST", "PUT"]) for path in NOT_HERE),
    ]


def _configure_logging(data: str) -> bool:
    """Of this process, as a ConfigureLogging in JSON says."""
    asked = msgspec.json.decode(data, type=ConfigureLogging)
    if asked.log_level is not None:
        logging.getLogger("runtime").setLevel(asked.log_level.upper())
    if asked.log_requests is not None:
        logging.getLogger(ACCESS).disabled = not asked.log_requests
    return True


class Control:
    def __init__(self, ctx: ServerContext) -> None:
        self._ctx = ctx
        ctx.peers.answers["configure_logging"] = _configure_logging
        ctx.peers.answers["abort_request"] = self._abort_for_client

    async def flush(self, request: Request) -> Response:
        wait = seconds(request, "timeout", MAX_WAIT_S)
        answer = await self._ask(FlushCacheReq(timeout_s=wait), wait)
        if answer.ok:
            return PlainTextResponse("The cache was flushed.\n")
        reason = answer.message.removeprefix("the cache was not flushed: ") or "requests are not finished"
        return PlainTextResponse(
            f"The cache was not flushed: {reason}. ?timeout=SECONDS waits for them.\n", 400
        )

    async def abort(self, request: Request) -> Response:
        asked = await self._ctx.asked(request, Abort)
        if CLIENT.get().is_tenant and (asked.abort_all or asked.prefix):
            raise Forbidden(
                "only the admin key is allowed to cancel the requests of others", where="abort_all / prefix"
            )
        manager = self._ctx.manager
        if asked.abort_all:
            manager.abort(None)
            return json_response(Done(True))
        rids = [asked.rid] if isinstance(asked.rid, str) else asked.rid or []
        if not rids or not all(rids):
            raise BadRequest("rid or abort_all is required", where="rid")
        if len(rids) > (most := self._ctx.config.max_batch_items):
            raise BadRequest(f"has {len(rids)} ids; at most {most}", where="rid", hint="max_batch_items")
        if CLIENT.get().is_tenant:
            own = msgspec.json.encode(_OwnAbort(rids, CLIENT.get().name)).decode()
            self._abort_for_client(own)
            await self._ctx.peers.all("abort_request", own, bool)
            return json_response(Done(True))
        for rid in rids:
            if asked.prefix:
                manager.abort(rid, prefix=True)
            else:
                manager.abort(rid)
                manager.abort(f"{rid}_", prefix=True)
        return json_response(Done(True))

    def _abort_for_client(self, data: str) -> bool:
        """Of what is waited for in this process, as an _OwnAbort in JSON says."""
        asked = msgspec.json.decode(data, type=_OwnAbort)
        for rid in asked.rids:
            self._ctx.manager.abort(rid, client=asked.client)
            self._ctx.manager.abort(f"{rid}_", prefix=True, client=asked.client)
        return True

    async def open_session(self, request: Request) -> Response:
        asked = await self._ctx.asked(request, OpenSession, empty_ok=True)
        if asked.capacity_of_str_len < 0:
            raise BadRequest(
                f"must be at least 0, got {asked.capacity_of_str_len}", where="capacity_of_str_len"
            )
        if asked.timeout is not None and not 0 < asked.timeout < math.inf:
            raise BadRequest(f"must be a positive number of seconds, got {asked.timeout}", where="timeout")
        if asked.session_id == "":
            raise BadRequest("is empty", where="session_id")
        answer = await self._ask(
            OpenSessionReq(
                session_id=asked.session_id,
                capacity=asked.capacity_of_str_len,
                timeout_s=self._ctx.config.session_timeout_s if asked.timeout is None else asked.timeout,
                streaming=asked.streaming,
                owner=CLIENT.get().owner,
            )
        )
        raise_if_refused(answer)
        return json_response(answer.data.get("session_id", asked.session_id))

    async def start_profile(self, request: Request) -> Response:
        asked = await self._ctx.asked(request, StartProfile, empty_ok=True)
        if asked.num_steps is not None and asked.num_steps < 1:
            raise BadRequest(f"must be at least 1, got {asked.num_steps}", where="num_steps")
        if asked.output_dir is not None and not _FOLDER_NAME.match(asked.output_dir):
            # A client must not choose where on this machine files are written.
            raise BadRequest("must be a plain name of letters, digits, '.', '_' and '-'", where="output_dir")
        return await self._order(ProfileReq(action="start", steps=asked.num_steps, folder=asked.output_dir))

    async def stop_profile(self, request: Request) -> Response:
        return await self._order(ProfileReq(action="stop"))

    async def configure_logging(self, request: Request) -> Response:
        asked = await self._ctx.asked(request, ConfigureLogging)
        if asked.log_level not in (None, *LEVELS):
            raise BadRequest(f"must be one of {', '.join(LEVELS)}", where="log_level")
        data = msgspec.json.encode(asked).decode()
        _configure_logging(data)
        await self._ctx.peers.all("configure_logging", data, bool)
        return json_response(Done(True))

    async def set_state(self, request: Request) -> Response:
        asked = await self._ctx.asked(request, SetInternalState)
        values = {name: value for name, value in asked.server_args.items() if value is not None}
        return await self._order(SetStateReq(values=values))

    async def precompile(self, request: Request) -> Response:
        asked = await self._ctx.asked(request, Precompile)
        patience = self._ctx.config.control_timeout_s
        wait = patience if asked.timeout is None else asked.timeout
        if not 0 < wait <= MAX_WAIT_S:
            raise BadRequest(f"must be more than 0 and at most {MAX_WAIT_S:g} s, got {wait}", where="timeout")
        answer = await self._ask(PrecompileReq(constraints=asked.constraints, timeout_s=wait), wait)
        raise_if_refused(answer)
        for one in answer.data["constraints"]:
            if not one["ok"]:
                one["error"] = error_body(from_dict(one["error"]))["error"]
        return json_response(answer.data)

    async def load_lora(self, request: Request) -> Response:
        asked = await self._ctx.asked(request, LoadLora)
        return await self._lora(
            LoadLoRAAdapterReq(lora_name=asked.lora_name, lora_path=asked.lora_path, pinned=asked.pinned)
        )

    async def unload_lora(self, request: Request) -> Response:
        asked = await self._ctx.asked(request, UnloadLora)
        return await self._lora(UnloadLoRAAdapterReq(lora_name=asked.lora_name))

    async def _lora(self, order: SingleReq) -> Response:
        answer = await self._ask(order)
        raise_if_refused(answer)
        return json_response(LoadedLoras(answer.data["loaded_adapters"]))

    async def update_weights(self, request: Request) -> Response:
        asked = await self._ctx.asked(request, UpdateWeights)
        if not asked.flush_cache:
            raise BadRequest("must be true: KV of other weights cannot be reused", where="flush_cache")
        if asked.load_format not in (None, "auto", "safetensors"):
            raise BadRequest(f"must be auto, got {asked.load_format!r}", where="load_format")
        order = UpdateWeightsReq(model_path=asked.model_path, abort_all=asked.abort_all_requests)
        answer = await self._ask(order, MAX_WAIT_S)
        try:
            raise_if_refused(answer)
        except ModelLoadError as error:  # the client's to choose, here
            raise BadRequest(str(error), where="model_path") from error
        return json_response(Done(True, answer.message))

    async def not_here(self, request: Request) -> Response:
        raise NoSuchService(NOT_HERE[request.url.path], where=request.url.path)

    async def _order(self, order: SingleReq) -> Response:
        answer = await self._ask(order)
        raise_if_refused(answer)
        return json_response(Done(True, answer.message, answer.data))

    async def _ask(self, order: SingleReq, longer: float = 0.0) -> ControlOutput:
        return await self._ctx.manager.control_async(order, self._ctx.config.control_timeout_s + longer)


def raise_if_refused(answer: ControlOutput) -> None:
    """Raise the error that the scheduler answered with, if it did."""
    if not answer.ok:
        if "code" in answer.data:
            raise from_dict(answer.data)
        raise BadRequest(answer.message or "the scheduler refused")


def seconds(request: Request, name: str, most: float, without: float = 0.0) -> float:
    """A query parameter in seconds, `without` where there is none. Raises BadRequest."""
    text = request.query_params.get(name, str(without))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= most:
        raise BadRequest(f"must be a number of seconds from 0 to {most:g}, got {text[:40]!r}", where=name)
    return value
