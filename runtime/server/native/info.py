"""The native routes for information: health, model, load, metrics.

GET /health_generate asks for a sign of life: one generated token, or any other message from the engine in the
meantime, so that a busy server is a healthy one. GET /health only says whether the engine is known to be
gone, unless health_generates is on.
"""

from __future__ import annotations

import asyncio
import platform
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from runtime.protocol.console import version
from runtime.protocol.control import GetStateReq
from runtime.protocol.errors import DeadlineExceeded, EngineDead, RuntimeFault
from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.protocol.requests.generate import GenerateReqInput
from runtime.server.context import ServerContext
from runtime.server.http.errors import RETRY_AFTER_S, NotFound, error_body, json_response
from runtime.server.http.openapi import Operation

HEALTH_PREFIX = "HEALTH_CHECK"
LOOK_S = 0.05
"""How often a health check looks whether any message came."""
SCRAPE_S = 2.0
"""How long a scrape waits for the scheduler's state."""


class Load(msgspec.Struct):
    """How busy the scheduler is: requests running and waiting, tokens whose KV is held."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


OPENAPI: dict[str, Operation] = {
    "GET /health": Operation("Does the engine live?", response="text", public=True),
    "GET /health_generate": Operation("Does the server generate?", response="text", public=True),
    "GET /ready": Operation("Can the server take requests?", response="text", public=True),
    "GET /metrics": Operation("Counters for Prometheus", response="text"),
    "GET /get_load": Operation("How busy the server is", response=list[Load], errors=(504,)),
    **{
        f"GET {path}": Operation("The model", response={"type": "object"})
        for path in ("/model_info", "/get_model_info")
    },
    **{
        f"GET {path}": Operation("Options, scheduler and version", response={"type": "object"}, errors=(504,))
        for path in ("/server_info", "/get_server_info")
    },
}


def routes(ctx: ServerContext) -> list[Route]:
    info = Info(ctx)
    return [
        Route("/health", info.health),
        Route("/health_generate", info.health_generate),
        Route("/ready", info.ready),
        Route("/metrics", info.metrics),
        Route("/get_load", info.load),
        Route("/model_info", info.model),
        Route("/get_model_info", info.model),
        Route("/server_info", info.server),
        Route("/get_server_info", info.server),
    ]


class Info:
    def __init__(self, ctx: ServerContext) -> None:
        self._ctx = ctx
        self._check: asyncio.Task[None] | None = None

    # -- alive? ----------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        if self._ctx.config.health_generates:
            return await self.health_generate(request)
        fault = self._ctx.manager.fault
        return PlainTextResponse("healthy\n") if fault is None else _unwell(fault)

    async def ready(self, request: Request) -> Response:
        fault = self._ctx.manager.fault
        return PlainTextResponse("ready\n") if fault is None else _unwell(fault)

    async def health_generate(self, request: Request) -> Response:
        try:
            await self._ctx.while_connected(request, self._checked())
        except RuntimeFault as fault:
            return _unwell(fault)
        return PlainTextResponse("healthy\n")

    async def _checked(self) -> None:
        """A sign of life, which all who ask at one time share: no key is needed to ask, and nobody shall be
        able to keep the engine busy with it."""
        if self._check is None or self._check.done():
            self._check = asyncio.create_task(self._sign_of_life(), name="sglang-dsl-health")
            self._check.add_done_callback(_heard_out)
        await asyncio.shield(self._check)

    async def _sign_of_life(self) -> None:
        """Return when one token was made, or any other message came from the engine, or it is paused. Raises
        DeadlineExceeded, EngineDead."""
        manager, patience = self._ctx.manager, self._ctx.config.health_timeout_s
        try:
            async with asyncio.timeout(patience):
                if (await self._state(patience)).get("paused"):
                    return
                before = manager.messages
                probe = asyncio.create_task(self._probe(patience), name="sglang-dsl-health-probe")
                try:
                    while manager.messages == before:
                        done, _ = await asyncio.wait({probe}, timeout=LOOK_S)
                        if done:
                            probe.result()
                            return
                finally:
                    probe.cancel()
                    await asyncio.gather(probe, return_exceptions=True)
        except TimeoutError:
            raise DeadlineExceeded(f"the engine gave no sign of life within {patience:g} s") from None

    async def _probe(self, patience: float) -> None:
        rid = f"{HEALTH_PREFIX}_{uuid.uuid4().hex}"
        if self._ctx.model.is_generation:
            await self._ctx.manager.submit(
                GenerateReqInput(
                    rid=rid,
                    input_ids=[0],
                    sampling_params={"max_new_tokens": 1, "temperature": 0.0},
                    log_metrics=False,
                    no_logs=True,
                    timeout_s=patience,
                )
            )
        else:
            await self._ctx.manager.embed(EmbeddingReqInput(rid=rid, input_ids=[0], timeout_s=patience))

    # -- what is it? -----------------------------------------------------------------------------------------

    async def model(self, request: Request) -> Response:
        facts = msgspec.to_builtins(self._ctx.model)
        path = facts.pop("path")
        return json_response(
            {
                **facts,
                "model_path": path,
                "served_model_name": self._ctx.served_name,
                "tokenizer_path": facts["tokenizer_path"] or path,
                "max_model_len": self._ctx.model.context_length,
                "preferred_sampling_params": facts["default_sampling"] or None,
                "architectures": [facts["architecture"]] if facts["architecture"] else [],
                "has_image_understanding": facts["is_multimodal"],
                "has_audio_understanding": False,
            }
        )

    async def server(self, request: Request) -> Response:
        state = await self._state(self._ctx.config.control_timeout_s)
        return json_response(
            {
                **self._ctx.info,
                "model_path": self._ctx.model.path,
                "tokenizer_path": self._ctx.model.tokenizer_path or self._ctx.model.path,
                "served_model_name": self._ctx.served_name,
                "status": "ready",
                "max_total_num_tokens": self._ctx.model.max_total_tokens,
                "max_running_requests": self._ctx.model.max_running_requests,
                "max_req_input_len": self._ctx.model.max_prompt_length,
                "internal_states": [state],
                "live_requests": self._ctx.manager.live,
                "version": version(),
                "python_version": platform.python_version(),
            }
        )

    async def load(self, request: Request) -> Response:
        state = await self._state(self._ctx.config.control_timeout_s)
        waiting = int(state.get("waiting", 0)) + int(state.get("compiling", 0))
        used = int(state.get("slots", 0)) - int(state.get("free", 0)) - int(state.get("evictable", 0))
        return json_response([Load(0, int(state.get("running", 0)) + waiting, waiting, max(0, used))])

    async def metrics(self, request: Request) -> Response:
        if not self._ctx.config.enable_metrics:
            raise NotFound("metrics are switched off", where="/metrics", hint="enable_metrics")
        try:
            state = await self._state(min(SCRAPE_S, self._ctx.config.control_timeout_s))
        except (DeadlineExceeded, EngineDead):
            state = None  # this process's own counters are still shown
        body, kind = self._ctx.metrics.render(state)
        return Response(body, headers={"content-type": kind})

    async def _state(self, patience: float) -> dict[str, Any]:
        answer = await self._ctx.manager.control_async(GetStateReq(), patience)
        return answer.data


def _heard_out(check: asyncio.Task[None]) -> None:
    """Those who asked may all be gone; then nobody else takes the error."""
    if not check.cancelled():
        check.exception()


def _unwell(fault: RuntimeFault) -> Response:
    """Whatever the reason, the status that load balancers understand."""
    return json_response(error_body(fault), 503, {"retry-after": str(RETRY_AFTER_S)})
