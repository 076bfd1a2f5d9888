"""An HTTP worker: a child process with tokenizer, TokenizerManager and web server, and no torch.

It answers as soon as it listens: "being loaded" first, then as the application. When it is stopped, or
another process died, every running request gets its answer or an error.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.config.options import options_of
from runtime.config.serving.server import ServerConfig
from runtime.processes.checkpoint.model import load_model
from runtime.processes.supervise.channel import ChildSpec, Stop
from runtime.processes.supervise.engine_client import EngineClient
from runtime.processes.supervise.lifecycle import Lifecycle
from runtime.protocol.errors import EngineDead, InternalFault, NotReady
from runtime.server.app import build_app
from runtime.server.http.errors import error_headers, error_response
from runtime.server.http.keys import KeyRing
from runtime.server.http.peers import Peers
from runtime.server.http.serve import make_server, new_event_loop, set_drain
from runtime.server.native.pages import html_response, wait_page
from runtime.server.observe.families import of_group
from runtime.server.observe.tracing import Tracing
from runtime.tools import DemoToolServer, MCPToolServer, ToolServer

log = logging.getLogger(__name__)

TICK_S = 0.5


def run(spec: ChildSpec, lifecycle: Lifecycle) -> None:
    """Raises what loading raises, and EngineDead when the web server ends by itself."""
    if spec.listener is None:
        raise InternalFault("an HTTP worker needs a listening socket", where=spec.name)
    give_back_large_blocks()
    ring = KeyRing(spec.server)
    lifecycle.reload = ring.reload
    client = EngineClient(Path(spec.folder), spec.name)
    entrance = Entrance()
    peers = Peers(Path(spec.folder), spec.name, spec.frontends)
    web = Web(entrance, spec, client, peers)
    lifecycle.stalled_s = lambda: web.stalled_s
    listener = socket.socket(fileno=spec.listener)
    tracing = None
    try:
        if not spec.replaces:  # else other workers answer meanwhile
            web.start(listener)
        lifecycle.on_stop(lambda order: web.stop(order, orphaned=lifecycle.orphaned))
        tools = asyncio.run(open_tool_server(spec.server))
        model = load_model(spec.engine)
        facts = lifecycle.facts(spec.engine.load_timeout_s)
        manager = client.open(spec.engine, spec.server, model, facts)
        if (endpoint := spec.server.otlp_traces_endpoint) is not None:
            served = spec.server.served_model_name or manager.model.served_name
            tracing = Tracing.to(endpoint, served, spec.name)
        entrance.app = build_app(
            manager,
            spec.server,
            info=shown_options(spec),
            tools=tools,
            peers=peers,
            leaving=lambda: lifecycle.leaving,
            ring=ring,
            processes=lambda: of_group(Path(spec.folder), spec.parent),
            tracing=tracing,
        )
        if spec.replaces:
            web.start(listener)
        lifecycle.ready()
        web.join()
    finally:
        web.stop(Stop(0.0), orphaned=False)
        web.join()
        client.close()
        if tracing is not None:
            tracing.close()


def give_back_large_blocks() -> None:
    """Return memory of long bodies to the system when it is freed. Otherwise glibc keeps such blocks after
    the first ones (M_MMAP_THRESHOLD in mallopt(3))."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK)


M_MMAP_THRESHOLD, LARGE_BLOCK = -3, 1 << 20


class Entrance:
    """The ASGI application until the real one is loaded."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            fault = NotReady("the model is being loaded", hint="try again in a moment")
            response = error_response(fault)
            if scope["method"] == "GET" and "text/html" in Headers(scope=scope).get("accept", ""):
                response = html_response(wait_page(fault.message), fault.status, error_headers(fault))
            await response(scope, receive, send)


class Web:
    """uvicorn in a thread, where it does not change the process's signal handlers."""

    def __init__(self, app: ASGIApp, spec: ChildSpec, client: EngineClient, peers: Peers) -> None:
        self._client = client
        self._peers = peers
        self._server: uvicorn.Server = make_server(app, spec.server)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._sockets: list[socket.socket] = []
        self._error: BaseException | None = None
        self._ticked = time.monotonic()
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()

    @property
    def stalled_s(self) -> float:
        """How long the event loop has been blocked."""
        if not self._thread.is_alive():
            return 0.0
        return max(0.0, time.monotonic() - self._ticked - TICK_S)

    def start(self, listener: socket.socket) -> None:
        self._sockets = [listener]
        self._ticked = time.monotonic()
        self._thread.start()

    def stop(self, order: Stop, *, orphaned: bool) -> None:
        """Accept no new connections; running requests get drain_s, then an error with the reason. A second
        order replaces the first."""
        why = EngineDead(
            "the server's supervisor died"
            if orphaned
            else f"the server is ending, and the request was not finished within {order.drain_s:g} s"
        )
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(order.drain_s, self._client.give_up, [why])
            self._timer.daemon = True
            self._timer.start()
            set_drain(self._server, order.drain_s)
            self._server.should_exit = True

    def join(self) -> None:
        """Wait for its end. Raises the error that ended it before `stop`."""
        if self._thread.is_alive():
            self._thread.join()
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        if not self._server.should_exit:
            raise EngineDead("the web server ended by itself")

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=new_event_loop) as runner:
                runner.run(self._serve())
        except BaseException as error:  # noqa: BLE001 - raised again by join, in the main thread
            self._error = error

    async def _serve(self) -> None:
        ticking = asyncio.create_task(self._tick())
        try:
            async with self._peers.listening():
                await self._server.serve(sockets=self._sockets)
        finally:
            ticking.cancel()

    async def _tick(self) -> None:
        while True:
            self._ticked = time.monotonic()
            await asyncio.sleep(TICK_S)


async def open_tool_server(config: ServerConfig) -> ToolServer | None:
    """The tool server of the options. MCP servers are asked for their tools. Raises ToolServerError for one
    that does not answer, BadRequest, MissingExtra."""
    if config.tool_server is None:
        return None
    if config.tool_server == "demo":
        return DemoToolServer(config.tool_documents, config.tool_timeout_s)
    server = MCPToolServer(config.tool_timeout_s, config.tool_timeout_s)
    await server.add_tool_server(config.tool_server)
    return server


def shown_options(spec: ChildSpec) -> Mapping[str, Any]:
    return {
        one.name: value
        for config in (spec.server, spec.engine)
        for one in options_of(type(config))
        if not one.metadata["secret"] and (value := dataclasses.asdict(config)[one.name]) is not None
    }
