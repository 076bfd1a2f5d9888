"""The native routes for information: health, model, load, metrics.

GET /health_generate waits for one generated token, or any other message from the engine in the meantime, so
that a busy server is healthy. GET /ready, and GET /health unless health_generates is on, report what keeps
requests waiting: the engine is dead, stuck or paused, or the server is about to end.
"""

from __future__ import annotations

import asyncio
import platform
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from runtime.protocol.console import version
from runtime.protocol.control import GetStateReq, HealthReq
from runtime.protocol.errors import DeadlineExceeded, EngineDead, NotFound, NotReady, RuntimeFault
from runtime.protocol.request_base import SingleReq
from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.protocol.requests.generate import GenerateReqInput
from runtime.server.context import RouteGroup, ServerContext, serves
from runtime.server.http.errors import RETRY_AFTER_S, error_body, json_response
from runtime.server.http.openapi import Operation
from runtime.server.http.sse import while_connected

HEALTH_PREFIX = "HEALTH_CHECK"
LOOK_S = 0.05
"""Between two checks for a message."""
GLANCE_S = 0.2
"""How long /health and /ready wait for the scheduler, which answers between two steps."""
SCRAPE_S = 2.0
"""How long a scrape waits for the scheduler's state."""


class Load(msgspec.Struct):
    """How busy the scheduler is: requests running and waiting, tokens whose KV is held."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int


class RankLoad(msgspec.Struct):
    """Of one engine: requests, tokens whose KV is held, the share of the pool that they are, tokens per
    second, and the share of prompts that came from the cache."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_used_tokens: int
    max_total_num_tokens: int
    token_usage: float
    max_running_requests: int
    gen_throughput: float
    cache_hit_rate: float


class TotalLoad(msgspec.Struct):
    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    total_used_tokens: int
    avg_token_usage: float


class Loads(msgspec.Struct):
    """There is one engine, of rank 0."""

    timestamp: str
    version: str
    dp_rank_count: int
    loads: list[RankLoad]
    aggregate: TotalLoad


class Version(msgspec.Struct):
    version: str


class Sleeping(msgspec.Struct):
    is_sleeping: bool


_MODEL = Operation("Information about the model", None, {"type": "object"})
_OPTIONS = Operation("Options, scheduler and version", None, {"type": "object"}, errors=(504,))


class Info(RouteGroup):
    def __init__(self, ctx: ServerContext) -> None:
        super().__init__(ctx)
        ctx.peers.answers["live"] = lambda _: ctx.manager.live
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._obstacle: RuntimeFault | None = None

    @serves(Operation("Is the engine healthy?", response="text", public=True), "GET /health")
    async def health(self, request: Request) -> Response:
        if self._ctx.config.health_generates:
            return await self.health_generate(request)
        fault = await self._trouble()
        return PlainTextResponse("healthy\n") if fault is None else _unwell(fault)

    @serves(Operation("Is the engine alive?", response="text"), "GET /ping", "POST /ping")
    async def ping(self, request: Request) -> Response:
        return await self.health(request)

    @serves(Operation("Can the server accept requests?", response="text", public=True), "GET /ready")
    async def ready(self, request: Request) -> Response:
        fault = await self._trouble()
        return PlainTextResponse("ready\n") if fault is None else _unwell(fault)

    async def _trouble(self) -> RuntimeFault | None:
        """Why a new request would wait long, or be refused; None if it would not. Concurrent checks share one
        question to scheduler and detokenizer, which count as stuck after health_timeout_s."""
        await asyncio.wait({self._shared("glance", self._look)}, timeout=GLANCE_S)
        if (fault := self._ctx.manager.fault) is not None:
            return fault
        if self._ctx.leaving():
            return NotReady("the server is shutting down", hint="use another server")
        return self._obstacle

    async def _look(self) -> None:
        """Ask the scheduler; the answer comes through the detokenizer. Raises EngineDead."""
        patience = self._ctx.config.health_timeout_s
        try:
            state = await self._question(HealthReq(), patience)
        except DeadlineExceeded:
            message = f"the engine has been stuck for {patience:g} s"
            self._obstacle = EngineDead(message, hint="health_timeout_s")
            return
        self._obstacle = None
        if state.get("released"):
            self._obstacle = NotReady("the model is asleep", hint="POST /wake_up")
        elif paused := state.get("paused"):
            message = f"generation is paused ({paused})"
            self._obstacle = NotReady(message, hint="POST /continue_generation")

    @serves(
        Operation("Can the server generate a token?", response="text", public=True), "GET /health_generate"
    )
    async def health_generate(self, request: Request) -> Response:
        try:
            await while_connected(request, self._checked())
        except RuntimeFault as fault:
            return _unwell(fault)
        return PlainTextResponse("healthy\n")

    async def _checked(self) -> None:
        """Concurrent checks share one: they need no key, and must not keep the engine busy."""
        await asyncio.shield(self._shared("health", self._sign_of_life))

    def _shared(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """The task of that name which is at work, or a new one."""
        task = self._tasks.get(name)
        if task is None or task.done():
            task = self._tasks[name] = asyncio.create_task(work(), name=f"sglang-dsl-{name}")
            task.add_done_callback(_take_error)
        return task

    async def _sign_of_life(self) -> None:
        """Return when a token was generated, or any other message came from the engine, or it is paused or
        asleep. Raises DeadlineExceeded, EngineDead."""
        manager, patience = self._ctx.manager, self._ctx.config.health_timeout_s
        try:
            async with asyncio.timeout(patience):
                state = await self._state(patience)
                if state.get("paused") or state.get("released"):
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
            raise DeadlineExceeded(f"the engine did not respond within {patience:g} s") from None

    async def _probe(self, patience: float) -> None:
        rid = f"{HEALTH_PREFIX}_{uuid.uuid4().hex}"
        if self._ctx.model.is_generation:
            request = GenerateReqInput(
                rid=rid,
                input_ids=[0],
                sampling_params={"max_new_tokens": 1, "temperature": 0.0},
                log_metrics=False,
                no_logs=True,
                timeout_s=patience,
            )
            await self._ctx.manager.submit(request)
        else:
            await self._ctx.manager.embed(EmbeddingReqInput(rid=rid, input_ids=[0], timeout_s=patience))

    @serves(_MODEL, "GET /model_info", "GET /get_model_info")
    async def model(self, request: Request) -> dict[str, Any]:
        facts = msgspec.to_builtins(self._ctx.model)
        path = facts.pop("path")
        return {
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

    @serves(_OPTIONS, "GET /server_info", "GET /get_server_info")
    async def server(self, request: Request) -> dict[str, Any]:
        model, manager = self._ctx.model, self._ctx.manager
        return {
            **self._ctx.info,
            "model_path": model.path,
            "tokenizer_path": model.tokenizer_path or model.path,
            "served_model_name": self._ctx.served_name,
            "status": "ready",
            "max_total_num_tokens": model.max_total_tokens,
            "max_running_requests": model.max_running_requests,
            "max_req_input_len": model.max_prompt_length,
            "internal_states": [await self._state(self._ctx.config.control_timeout_s)],
            "live_requests": manager.live + sum(await self._ctx.peers.all("live", "", int)),
            "version": version(),
            "python_version": platform.python_version(),
        }

    @serves(Operation("Load of the server", response=list[Load], errors=(504,)), "GET /get_load")
    async def load(self, request: Request) -> list[Load]:
        state = await self._counts()
        waiting = state["waiting"] + state["compiling"]
        used = state["slots"] - state["free"] - state["evictable"]
        return [Load(0, state["running"] + waiting, waiting, max(0, used))]

    @serves(Operation("Load of the server, in detail", response=Loads, errors=(504,)), "GET /v1/loads")
    async def loads(self, request: Request) -> Loads:
        state = await self._counts()
        running, waiting = state["running"], state["waiting"] + state["compiling"]
        used, share = state["num_used_tokens"], float(state["token_usage"])
        one = RankLoad(
            dp_rank=0,
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            num_used_tokens=used,
            max_total_num_tokens=self._ctx.model.max_total_tokens,
            token_usage=share,
            max_running_requests=self._ctx.model.max_running_requests,
            gen_throughput=float(state["gen_throughput"]),
            cache_hit_rate=float(state["cache_hit_rate"]),
        )
        now = datetime.fromtimestamp(self._ctx.clock(), UTC).isoformat()
        total = TotalLoad(running, waiting, running + waiting, used, share)
        return Loads(now, version(), 1, [one], total)

    @serves(Operation("Whether memory is released", None, Sleeping, errors=(504,)), "GET /is_sleeping")
    async def is_sleeping(self, request: Request) -> Sleeping:
        return Sleeping(bool((await self._ctx.control(HealthReq())).data.get("released")))

    @serves(Operation("The version of this server", response=Version), "GET /version")
    async def version(self, request: Request) -> Version:
        return Version(version())

    @serves(Operation("Metrics for Prometheus", response="text"), "GET /metrics")
    async def metrics(self, request: Request) -> Response:
        if not self._ctx.config.enable_metrics:
            raise NotFound("metrics are disabled", where="/metrics", hint="enable_metrics")
        try:
            state = await self._state(min(SCRAPE_S, self._ctx.config.control_timeout_s))
        except (DeadlineExceeded, EngineDead):
            state = None  # this process's own counters are still shown
        body, kind = self._ctx.metrics.render(state, request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    async def _counts(self) -> defaultdict[str, Any]:
        """The scheduler's state; 0 for what it does not count."""
        return defaultdict(int, await self._state(self._ctx.config.control_timeout_s))

    async def _state(self, patience: float) -> dict[str, Any]:
        return await self._question(GetStateReq(), patience)

    async def _question(self, question: SingleReq, patience: float) -> dict[str, Any]:
        return (await self._ctx.manager.control_async(question, patience)).data


def _take_error(check: asyncio.Task[None]) -> None:
    """Retrieve the error: the requests that wait for it may have been cancelled."""
    if not check.cancelled():
        check.exception()


def _unwell(fault: RuntimeFault) -> Response:
    """Always with the status that load balancers understand."""
    return json_response(error_body(fault), 503, {"retry-after": str(RETRY_AFTER_S)})
