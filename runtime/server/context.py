"""ServerContext: what every route needs; RouteGroup: handlers with the paths that they serve."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.config.serving.server import ServerConfig
from runtime.processes.checkpoint.tokenizer import LONG
from runtime.processes.frontend.tokenizer_manager import TokenizerManager
from runtime.protocol.control import ControlOutput
from runtime.protocol.errors import BadRequest, RuntimeFault, from_dict
from runtime.protocol.model_info import ModelInfo
from runtime.protocol.request_base import SingleReq
from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.protocol.requests.generate import GenerateReqInput
from runtime.server.http.body import SHORT, Body, read_body, to_struct
from runtime.server.http.errors import json_response
from runtime.server.http.metrics import Metrics
from runtime.server.http.openapi import Operation
from runtime.server.http.peers import Peers
from runtime.server.http.sse import EventStream, fault_event, while_connected
from runtime.tools import ToolServer

T = TypeVar("T")
K = TypeVar("K", bound=msgspec.Struct)
F = TypeVar("F", bound=Callable[..., Any])
Q = TypeVar("Q", GenerateReqInput, EmbeddingReqInput)


@dataclass(frozen=True, slots=True)
class ServerContext:
    """manager     the only way to the engine
    metrics  counters of this process
    clock    seconds since 1970, for `created` fields
    info     the server's options for /server_info, without secrets
    tools    the tools that the server runs, if any
    peers    the other HTTP workers
    leaving  whether the server is shutting down
    served_names  the model's names for clients
    """

    manager: TokenizerManager
    model: ModelInfo
    config: ServerConfig
    metrics: Metrics
    clock: Callable[[], float] = time.time
    info: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolServer | None = None
    peers: Peers = field(default_factory=Peers)
    leaving: Callable[[], bool] = lambda: False
    served_names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "served_names", self.config.served_names or (self.model.served_name,))

    @property
    def served_name(self) -> str:
        return self.served_names[0]

    async def admit(
        self,
        request: Request,
        kind: type[K],
        make: Callable[[K], T],
        *,
        empty_ok: bool = False,
        encodes: bool = False,
    ) -> T:
        """What `make` returns for the body, a `kind` (a msgspec struct). encodes: `make` tokenizes texts.
        Raises what read_body, to_struct and `make` raise."""
        body = await self.read(request, kind, empty_ok=empty_ok)
        return await self.build(body, lambda data: make(to_struct(data, kind)), encodes)

    async def body(self, request: Request, kind: type[K], *, empty_ok: bool = False) -> K:
        """The body as a `kind`. Raises as admit."""
        return await self.admit(request, kind, lambda body: body, empty_ok=empty_ok)

    async def read(self, request: Request, kind: Any, *, empty_ok: bool = False) -> Body:
        """The first half of admit: the body within its limits, not converted."""
        return await read_body(request, self.config, empty_ok=empty_ok, names=kind.__struct_encode_fields__)

    async def build(self, body: Body, make: Callable[[dict[str, Any]], T], encodes: bool = False) -> T:
        """The second half: what `make` returns for the body. For all but short bodies it runs in a thread,
        with clients taking turns."""
        if body.size <= (LONG if encodes else SHORT):
            return make(body.data)
        size = body.size if encodes else body.values
        return await self.manager.encoding.run(size, lambda: make(body.data))

    async def control(self, order: SingleReq, longer_s: float = 0.0) -> ControlOutput:
        """The engine's answer to an order, within control_timeout_s and `longer_s`. Raises its error."""
        answer = await self.manager.control_async(order, self.config.control_timeout_s + longer_s)
        if answer.ok:
            return answer
        if "code" in answer.data:
            raise from_dict(answer.data)
        raise BadRequest(answer.message or "the scheduler refused")

    def event_stream(
        self, events: Any, on_fault: Callable[[RuntimeFault], bytes] = fault_event
    ) -> EventStream:
        """A response that sends `events`, an async generator of whole events as bytes (see EventStream)."""
        return EventStream(events, keep_alive_s=self.config.stream_comment_s, on_fault=on_fault)

    async def reply(
        self, request: Request, job: Any, on_fault: Callable[[RuntimeFault], bytes] = fault_event
    ) -> Any:
        """The answer of a job (`streams`, `stream()`, `whole()`): a stream of events, or all at once."""
        if job.streams:
            return self.event_stream(job.stream(), on_fault)
        return await while_connected(request, job.whole())

    def normalized(self, request: Q) -> Q:
        """The request, normalised and with the server's limits. Raises BadRequest."""
        request = self.with_deadline(request)
        request.normalize_batch_and_arguments()
        limit = self.config.max_batch_items
        if len(request) > limit:
            raise BadRequest(
                f"{len(request)} prompts and samples in one request; at most {limit}",
                where="sampling_params.n" if request.batch_size == 1 else "text",
                hint="send several requests, or start the server with a larger max_batch_items",
            )
        return request

    def with_deadline(self, request: Q) -> Q:
        """The request, not yet normalised, with the server's deadline unless its own is earlier."""
        limit = self.config.request_timeout_s
        if limit is None or (request.timeout_s is not None and request.timeout_s <= limit):
            return request
        return msgspec.structs.replace(request, timeout_s=limit)


def serves(operation: Operation, *keys: str) -> Callable[[F], F]:
    """Make a method of a RouteGroup the handler of "METHOD /path" keys, which `operation` describes."""

    def mark(handler: F) -> F:
        handler.__dict__["served"] = dict.fromkeys(keys, operation)
        return handler

    return mark


class RouteGroup:
    """Handlers of some routes. What one returns is sent as JSON, unless it is a Response.

    OPENAPI: "METHOD /path" -> its operation, of all methods marked with `serves`.
    """

    OPENAPI: ClassVar[dict[str, Operation]] = {}

    def __init_subclass__(cls) -> None:
        marked = (getattr(member, "served", {}) for member in vars(cls).values())
        cls.OPENAPI = {key.replace(":path}", "}"): about for keys in marked for key, about in keys.items()}

    def __init__(self, ctx: ServerContext) -> None:
        self._ctx = ctx

    def routes(self) -> list[Route]:
        routes: list[Route] = []
        for name, member in vars(type(self)).items():
            methods: dict[str, list[str]] = {}
            for key in getattr(member, "served", ()):
                method, _, path = key.partition(" ")
                methods.setdefault(path, []).append(method)
            for path, listed in methods.items():
                routes.append(Route(path, json_endpoint(getattr(self, name)), methods=listed))
        return routes


def json_endpoint(handler: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    """A handler as Starlette calls it."""

    async def endpoint(request: Request) -> Response:
        answer = await handler(request)
        return answer if isinstance(answer, Response) else json_response(answer)

    return endpoint
