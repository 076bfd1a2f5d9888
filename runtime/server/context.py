"""ServerContext: what every route is made with. Holds no state of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.routing import Route

from runtime.config.serving.server import ServerConfig
from runtime.processes.checkpoint.tokenizer import LONG
from runtime.processes.frontend.tokenizer_manager import TokenizerManager
from runtime.protocol.errors import BadRequest, RuntimeFault
from runtime.protocol.model_info import ModelInfo
from runtime.protocol.requests.embedding import EmbeddingReqInput
from runtime.protocol.requests.generate import GenerateReqInput
from runtime.server.http.admission import SHORT
from runtime.server.http.body import Body, read_body, to_struct
from runtime.server.http.metrics import Metrics
from runtime.server.http.openapi import Operation
from runtime.server.http.peers import Peers
from runtime.server.http.sse import EventStream, fault_event, unless_gone
from runtime.tools import ToolServer

T = TypeVar("T")
K = TypeVar("K")
Q = TypeVar("Q", GenerateReqInput, EmbeddingReqInput)


class RouteModule(Protocol):
    """A module of routes (see app.MODULES)."""

    OPENAPI: dict[str, Operation]

    def routes(self, ctx: ServerContext) -> list[Route]: ...


@dataclass(frozen=True, slots=True)
class ServerContext:
    """manager     the only way to the engine
    model    facts about the model that is served
    config   limits, and what is switched on
    metrics  counters of this process
    clock    seconds since 1970, for `created` fields
    info     what /server_info shows of the options the server was started with; no secrets
    tools    where calls are run that are not the client's; None: nowhere
    peers    the other HTTP workers
    leaving  whether the server is shutting down
    served_names  by which clients may ask for the model
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
        """The one that answers carry."""
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
        """What `make` makes of the body, which is read as a `kind` (a msgspec struct): the one way from a
        body to work. encodes: `make` reads whole texts. Raises what read_body, to_struct and `make` raise."""
        body = await self.read(request, kind, empty_ok=empty_ok)
        return await self.made(body, lambda data: make(to_struct(data, kind)), encodes)

    async def asked(self, request: Request, kind: type[K], *, empty_ok: bool = False) -> K:
        """The body as a `kind`, where no work follows from it. Raises as admit."""
        return await self.admit(request, kind, lambda body: body, empty_ok=empty_ok)

    async def read(self, request: Request, kind: Any, *, empty_ok: bool = False) -> Body:
        """The first half of admit: the limits of the body are checked, and nothing else."""
        return await read_body(request, self.config, empty_ok=empty_ok, names=kind.__struct_encode_fields__)

    async def made(self, body: Body, make: Callable[[dict[str, Any]], T], encodes: bool = False) -> T:
        """The other half: what `make` makes of the body as it stands. All but a short one is worked on beside
        the event loop, in turn for every client."""
        if body.size <= (LONG if encodes else SHORT):
            return make(body.data)
        size = body.size if encodes else body.values
        return await self.manager.encoding.run(size, lambda: make(body.data))

    async def while_connected(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives; it is cancelled (and with it the requests it waits for) when the client goes."""
        return await unless_gone(request, work)

    def event_stream(
        self,
        events: Any,
        on_fault: Callable[[RuntimeFault], bytes] = fault_event,
    ) -> EventStream:
        """A response that sends `events`, an async generator of whole events as bytes (see EventStream)."""
        return EventStream(events, keep_alive_s=self.config.stream_comment_s, on_fault=on_fault)

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
        """The request, not normalised yet, with the server's deadline if its own is missing or later."""
        limit = self.config.request_timeout_s
        if limit is None or (request.timeout_s is not None and request.timeout_s <= limit):
            return request
        return msgspec.structs.replace(request, timeout_s=limit)
