"""Router: the application in front of the workers. Which request goes to one of them, which to a
pair, and which to all.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Collection
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.routing import Router as Paths
from starlette.types import ASGIApp

from runtime.config.serving.router import RouterConfig
from runtime.protocol.console import version
from runtime.protocol.control import VERBS
from runtime.protocol.errors import NotFound, NoWorker, RuntimeFault, WorkerFailed
from runtime.server.anthropic import routes as anthropic
from runtime.server.context import json_endpoint
from runtime.server.http.body import decode, read_bytes
from runtime.server.http.errors import error_response
from runtime.server.http.limits import Gate, with_cors
from runtime.server.http.sse import event, fault_event
from runtime.server.router.answer import Learn, Order
from runtime.server.router.health import Watch
from runtime.server.router.metrics import RouterMetrics
from runtime.server.router.pool import Pool, RequestFacts, Worker, checked_url, make_workers, read_facts
from runtime.server.router.relay import Fleet, PairRelay, Relay, Tails, splits
from runtime.server.router.upstream import Upstream, json_of, read_some

RESPONSES = "/v1/responses"
GENERATE: dict[str, tuple[str, ...]] = {
    "/generate": ("POST", "PUT"),
    "/v1/completions": ("POST",),
    "/v1/chat/completions": ("POST",),
    "/v1/messages": ("POST",),
}
"""What a pair of workers can do: path -> methods. Their bodies may carry the bootstrap fields."""
ONE: dict[str, tuple[str, ...]] = {
    "/encode": ("POST", "PUT"),
    "/classify": ("POST", "PUT"),
    "/v1/embeddings": ("POST",),
    "/v1/messages/count_tokens": ("POST",),
    "/tokenize": ("POST",),
    "/v1/tokenize": ("POST",),
    "/detokenize": ("POST",),
    "/v1/detokenize": ("POST",),
    "/parse_function_call": ("POST",),
    "/separate_reasoning": ("POST",),
    "/openapi.json": ("GET",),
    "/v1/models": ("GET",),
    "/v1/models/{model:path}": ("GET",),
    "/model_info": ("GET",),
    "/get_model_info": ("GET",),
}
"""What any worker can do: path -> methods."""
ORDERS = (*(path for verb in VERBS.values() if verb.admin for path in verb.paths), "/configure_logging")
"""Paths that change a server for every client (see Access)."""
ALL = (*ORDERS, "/abort_request", "/precompile")
"""Paths that go to all workers."""
MOST_ANSWER = 4 << 20
"""Bytes that are read of a worker's answer to a control request."""
_RESPONSE_ID = re.compile(rb'"id":\s*"(resp_[\w-]{1,100})"')
_SHAPES = tuple((prefix, anthropic.error_body) for prefix in anthropic.PREFIXES)


class Router:
    """`async with router.running()`: it probes the workers, and closes its connections to them at the end.
    `app` is the ASGI application. Raises BadRequest and UnknownName for options that are wrong."""

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        roles = ("worker",) if config.worker else ("prefill", "decode")
        self.pools = tuple(
            Pool(
                make_workers(getattr(config, role), role, config),
                config.decode_policy if role == "decode" else config.policy,
                config,
            )
            for role in roles
        )
        self.metrics = RouterMetrics(lambda: self.workers)
        self._upstream = Upstream(config)
        self._fleet = Fleet(self.pools, self._upstream, self.metrics, config.retries, Tails())
        self._served = config.server
        self._learn: dict[str, Learn] = {
            RESPONSES: self._response_began,
            "/open_session": self._session_opened,
            "/close_session": self._session_closed,
        }
        self.app = self._build()

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Of all pools."""
        return tuple(one for pool in self.pools for one in pool.workers)

    async def become(self, pool: Pool, urls: Collection[str]) -> None:
        """Replace the servers of `pool` by these: the same as before, others, or none. Raises BadRequest."""
        known = {one.name: one for one in pool.workers}
        named = {checked_url(url, pool.role): url for url in urls}
        pool.become([known.get(name) or Worker(url, pool.role, self.config) for name, url in named.items()])

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probe the workers, and have connections to them, within the block."""
        async with self._upstream:
            watches = [
                asyncio.create_task(Watch(pool, self._upstream, self.config).run(), name="sglang-dsl-watch")
                for pool in self.pools
            ]
            try:
                yield
            finally:
                for one in watches:
                    one.cancel()
                await asyncio.gather(*watches, return_exceptions=True)
                await self._fleet.tails.close()

    def give_up(self, reason: str) -> None:
        for worker in self.workers:
            worker.give_up(reason)

    def _build(self) -> ASGIApp:
        routes = [
            *(Route(path, self._generate, methods=list(methods)) for path, methods in GENERATE.items()),
            *(Route(path, self._relay, methods=list(methods)) for path, methods in ONE.items()),
            *(Route(path, self._all, methods=["POST"]) for path in ALL),
            *(Route(path, self._relay, methods=["POST"]) for path in self._learn),
            Route(RESPONSES + "/{response_id}", self._response, methods=["GET", "DELETE"]),
            Route(RESPONSES + "/{response_id}/cancel", self._response, methods=["POST"]),
            Route("/health", self._health),
            Route("/health_generate", self._health_generate),
            Route("/ready", self._ready),
            Route("/metrics", self._metrics),
            Route("/workers", json_endpoint(self._states)),
            Route("/get_load", json_endpoint(self._load)),
            Route("/server_info", json_endpoint(self._info)),
            Route("/get_server_info", json_endpoint(self._info)),
        ]
        gate = Gate(Paths(routes), self._served, self.metrics.http, _SHAPES, orders=ORDERS)
        return with_cors(gate, self._served)

    # -- to one worker ---------------------------------------------------------------------------------------

    async def _generate(self, request: Request) -> ASGIApp:
        """To a pair, if there are pairs and the request can be split."""
        if len(self.pools) == 1:
            return await self._relay(request)
        raw = await read_bytes(request, self._served)
        body, _ = await decode(raw, self._served)
        order = self._order(request, raw, read_facts(raw))
        if not isinstance(body, dict) or not splits(body):
            return Relay(order, self._fleet)
        return PairRelay(order, body, self._fleet)

    async def _response(self, request: Request) -> ASGIApp:
        body = await read_bytes(request, self._served)
        facts = RequestFacts(held=request.path_params["response_id"])
        return Relay(self._order(request, body, facts), self._fleet)

    async def _relay(self, request: Request) -> ASGIApp:
        body = await read_bytes(request, self._served)
        return Relay(self._order(request, body, read_facts(body)), self._fleet)

    def _order(self, request: Request, body: bytes, facts: RequestFacts) -> Order:
        method, target, on_fault = request.method, _target(request), _error_event(request)
        learn = self._learn.get(request.url.path)
        return Order(method, target, request.headers, body, facts, on_fault, learn)

    # -- what only one worker has ----------------------------------------------------------------------------

    def _response_began(self, facts: RequestFacts, worker: Worker, beginning: bytes) -> None:
        if match := _RESPONSE_ID.search(beginning):
            self.pools[-1].holds(match[1].decode(), worker)

    def _session_opened(self, facts: RequestFacts, worker: Worker, beginning: bytes) -> None:
        if isinstance(session := json_of(beginning), str):
            self.pools[-1].holds(session, worker)

    def _session_closed(self, facts: RequestFacts, worker: Worker, beginning: bytes) -> None:
        if facts.held is not None:
            self.pools[-1].dropped(facts.held)

    # -- to all ----------------------------------------------------------------------------------------------

    async def _all(self, request: Request) -> Response:
        """The first worker's answer if all succeed, else the first failure, which names its worker."""
        body = await read_bytes(request, self._served)
        answers = await self._gather(request.method, _target(request), request.headers, body)
        if not answers:
            return _unavailable("there is no server")
        good = [one for one in answers if isinstance(one, Response)]
        for one in answers:
            if not isinstance(one, Response):
                return error_response(one)
        return next((one for one in good if one.status_code >= 400), good[0])

    async def _gather(
        self, method: str, target: str, headers: Any = None, body: bytes = b""
    ) -> list[Response | RuntimeFault]:

        async def ask(worker: Worker) -> Response | RuntimeFault:
            try:
                async with self._upstream.asking(
                    worker, method, target, headers=headers or {}, body=body,
                    patience=self.config.control_timeout_s, counted=False,
                ) as response:  # fmt: skip
                    content = await read_some(response, MOST_ANSWER)
            except WorkerFailed as fault:
                return fault
            kind = response.headers.get("content-type")
            return Response(content, response.status, media_type=kind)

        return await asyncio.gather(*(ask(worker) for worker in self.workers))

    # -- of its own ------------------------------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return PlainTextResponse("healthy\n")

    async def _ready(self, request: Request) -> Response:
        for pool in self.pools:
            if not pool.available:
                return _unavailable(f"no {pool.role} server is available")
        return PlainTextResponse("ready\n")

    async def _health_generate(self, request: Request) -> Response:
        """Whether some worker of each role generates."""
        answers = dict(zip(self.workers, await self._gather("GET", "/health_generate"), strict=True))
        for pool in self.pools:
            of_pool = [answers[one] for one in pool.workers]
            if not any(isinstance(one, Response) and one.status_code == 200 for one in of_pool):
                return _unavailable(f"no {pool.role} server can generate")
        return PlainTextResponse("healthy\n")

    async def _metrics(self, request: Request) -> Response:
        if not self.config.enable_metrics:
            raise NotFound("metrics are disabled", where="/metrics", hint="enable_metrics")
        body, kind = self.metrics.render()
        return Response(body, headers={"content-type": kind})

    async def _states(self, request: Request) -> dict[str, Any]:
        return {"workers": [_state(one) for one in self.workers]}

    async def _load(self, request: Request) -> list[dict[str, Any]]:
        answers = [_json(answer) for answer in await self._gather("GET", "/get_load")]
        loads = [one for some in answers if isinstance(some, list) for one in some if isinstance(one, dict)]
        return [{**one, "dp_rank": rank} for rank, one in enumerate(loads)]

    async def _info(self, request: Request) -> dict[str, Any]:
        """The first worker's answer, and the states of all."""
        answers = [_json(answer) for answer in await self._gather("GET", "/server_info")]
        infos = [one for one in answers if isinstance(one, dict)]
        roles = {
            role: [one.name for one in self.workers if one.role == role] for role in ("prefill", "decode")
        }
        return {
            **(infos[0] if infos else {}),
            "internal_states": [state for info in infos for state in info.get("internal_states") or []],
            "router": {"version": version(), "policy": self.config.policy},
            "workers": [
                {**_state(worker), "answered": isinstance(answer, dict)}
                for worker, answer in zip(self.workers, answers, strict=True)
            ],
            **roles,
        }


def _unavailable(message: str) -> Response:
    return error_response(NoWorker(message, hint="GET /workers"))


def _state(worker: Worker) -> dict[str, Any]:
    is_prefill = worker.role == "prefill"
    return {
        "url": worker.name,
        "role": worker.role,
        "state": worker.state,
        "reason": worker.reason,
        "active": worker.active,
        **({"bootstrap": f"{worker.bootstrap_host}:{worker.bootstrap_port}"} if is_prefill else {}),
    }


def _json(answer: Response | RuntimeFault) -> Any:
    """A worker's answer decoded, None for an error."""
    if not isinstance(answer, Response) or answer.status_code != 200:
        return None
    return json_of(bytes(answer.body))


def _target(request: Request) -> str:
    """Path and query as the client wrote them."""
    path = request.scope.get("raw_path") or request.url.path.encode()
    query = request.scope["query_string"]
    return (path.split(b"?")[0] + (b"?" + query if query else b"")).decode("ascii", "replace")


def _error_event(request: Request) -> Callable[[RuntimeFault], bytes]:
    """How an error looks inside a stream of this path."""
    if request.url.path.startswith(anthropic.PREFIXES):
        return anthropic.fault_event
    return _response_fault if request.url.path.startswith(RESPONSES) else fault_event


def _response_fault(fault: RuntimeFault) -> bytes:
    """For streams of /v1/responses. It is the last event, so its number does not matter."""
    facts = {"type": "error", "code": fault.code, "message": str(fault), "param": None, "sequence_number": 0}
    return event(facts, "error")
