"""Small real servers that play workers, and a real router before them, all in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.config.serving.router import RouterConfig
from runtime.config.serving.server import ServerConfig
from runtime.server.http.serve import make_server
from runtime.server.router.app import Router

PATIENCE_S = 300.0


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not true():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def hosting(
    app: ASGIApp, port: int = 0, servers: list[uvicorn.Server] | None = None
) -> AsyncIterator[str]:
    """The application behind a socket of its own; its URL. servers: to add it to."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", port))
        server = make_server(app, ServerConfig(drain_timeout_s=0.0))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
        if isinstance(app, Played):
            app.server = server
        if servers is not None:
            servers.append(server)
        task = asyncio.create_task(server.serve(sockets=[held]))
        await until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{held.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            await task
            # The listener is closed; of those that it took until then, some may be known a turn later.
            for _ in range(3):
                for connection in list(server.server_state.connections):
                    connection.transport.abort()  # type: ignore[union-attr]
                await asyncio.sleep(0)


class Cut(Exception):
    """Raised by a played worker: its connection is cut."""


@dataclass
class Call:
    """A request that a played worker got, and the way to answer it."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    send: Send
    receive: Receive

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    async def answer(self, data: Any, status: int = 200, kind: str = "application/json") -> None:
        body = data if isinstance(data, bytes) else json.dumps(data).encode()
        await self.start(status, kind, len(body))
        await self.piece(body, last=True)

    async def start(
        self, status: int = 200, kind: str = "text/event-stream", length: int | None = None
    ) -> None:
        headers = [(b"content-type", kind.encode())]
        if length is not None:
            headers.append((b"content-length", str(length).encode()))
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def piece(self, data: bytes, last: bool = False) -> None:
        await self.send({"type": "http.response.body", "body": data, "more_body": not last})

    async def gone(self) -> None:
        """Return when the router has left."""
        while (await self.receive())["type"] != "http.disconnect":
            pass


Behaviour = Callable[["Played", Call], Awaitable[None]]


async def echo(worker: Played, call: Call) -> None:
    await call.answer({"worker": worker.name, "path": call.path})


@dataclass
class Played:
    """A worker that does what `does` says, and answers looks at it by `ready`; mute: it answers nothing."""

    name: str
    does: Behaviour = echo
    ready: bool = True
    mute: bool = False
    got: list[Call] = field(default_factory=list)
    url: str = ""
    server: uvicorn.Server | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        call = Call(scope["path"], headers, body, send, receive)
        if self.mute:
            await call.gone()
            return
        if call.path == "/ready":
            await call.answer(
                {} if self.ready else {"error": {"message": "being loaded"}}, 200 if self.ready else 503
            )
            return
        self.got.append(call)
        try:
            await self.does(self, call)
        except Cut:
            assert self.server is not None
            for connection in list(self.server.server_state.connections):
                if connection.scope is scope:  # type: ignore[union-attr]
                    # Not aborted: what was sent arrives.
                    connection.transport.close()  # type: ignore[union-attr]


@dataclass
class Scene:
    workers: list[Played]
    router: Router
    url: str
    client: httpx.AsyncClient

    async def post(self, path: str = "/generate", headers: Any = None, **body: Any) -> httpx.Response:
        return await self.client.post(path, json=body, headers=headers)

    def worker_at(self, url: str) -> Played:
        return next(one for one in self.workers if one.url == url)

    def known(self, played: Played) -> Any:
        """The router's worker of a played one."""
        return next(one for one in self.router.workers if one.name == played.url)


@contextlib.asynccontextmanager
async def scene(
    *workers: Played,
    prefill: int = 0,
    wait: bool = True,
    urls_as: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Scene]:
    """The router with these workers, once it has found those that are ready. prefill: the first so many are
    prefill servers, and the others decode servers. urls_as: instead of that, the router's options."""
    servers: list[uvicorn.Server] = []
    async with contextlib.AsyncExitStack() as stack:
        for one in workers:
            one.url = await stack.enter_async_context(hosting(one, servers=servers))
        urls = [one.url for one in workers]
        roles = {"prefill": urls[:prefill], "decode": urls[prefill:]} if prefill else {"worker": urls}
        policies = {"policy": "round_robin", "decode_policy": "round_robin"}
        given = {**(roles if urls_as is None else urls_as), **policies, "probe_interval_s": 0.05}
        router = Router(RouterConfig.of({**given, **options}))
        await stack.enter_async_context(router.running())
        url = await stack.enter_async_context(hosting(router.app, servers=servers))
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False)
        )
        made = Scene(list(workers), router, url, client)
        if wait:
            await until(lambda: all(made.known(one).available for one in workers if one.ready))
        yield made
        for server in servers:  # each needs a while to notice: all at once
            server.should_exit = server.force_exit = True


def play(work: Coroutine[Any, Any, None], patience_s: float = PATIENCE_S) -> None:
    """Run a test, with a deadline."""

    async def limited() -> None:
        async with asyncio.timeout(patience_s):
            await work

    asyncio.run(limited())
