"""build_app: routes, middleware and the OpenAPI document, put together into one ASGI application."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.config.serving.server import ServerConfig
from runtime.processes.frontend.tokenizer_manager import TokenizerManager
from runtime.protocol.console import version
from runtime.server.anthropic import routes as anthropic
from runtime.server.context import RouteGroup, ServerContext
from runtime.server.http.keys import KeyRing
from runtime.server.http.limits import Gate, with_cors
from runtime.server.http.metrics import Metrics
from runtime.server.http.openapi import Operation, document
from runtime.server.http.peers import Peers
from runtime.server.native.control import Control
from runtime.server.native.generate import Generate
from runtime.server.native.info import Info
from runtime.server.native.introspection import Introspection
from runtime.server.native.pages import Pages
from runtime.server.native.verbs import ORDERS, Verbs
from runtime.server.observe.families import Processes
from runtime.server.observe.tracing import Tracing
from runtime.server.ollama import routes as ollama
from runtime.server.openai.chat import Chat
from runtime.server.openai.completions import Completions
from runtime.server.openai.embeddings import Embeddings
from runtime.server.openai.models import Models
from runtime.server.openai.responses.routes import Responses
from runtime.server.openai.scores import Scores
from runtime.server.openai.texts import Texts
from runtime.tools import ToolServer

MODULES: tuple[type[RouteGroup], ...] = (
    Generate, Texts, Info, Introspection, Control, Verbs, Models, Completions, Chat,
    Embeddings, Scores, Responses, anthropic.Messages, ollama.Ollama,
)  # fmt: skip
"""The groups of routes of a server."""
SHAPES = tuple((prefix, api.error_body) for api in (anthropic, ollama) for prefix in api.PREFIXES)
"""(path prefix, the body of its errors)."""


class Paths(Router):
    """A Router that finds routes without parameters in a dict."""

    def __init__(self, routes: Sequence[Route]) -> None:
        super().__init__(routes)
        plain = [route for route in reversed(routes) if not route.param_convertors]  # the first one counts
        self._plain = {(method, route.path): route for route in plain for method in route.methods or ()}

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http" and not scope.get("root_path"):
            route = self._plain.get((scope["method"], scope["path"]))
        if route is None:
            await super().app(scope, receive, send)
            return
        scope.update(router=self, route=route, endpoint=route.endpoint, path_params={})
        await route.handle(scope, receive, send)


def build_app(
    manager: TokenizerManager,
    config: ServerConfig,
    *,
    info: Mapping[str, Any] | None = None,
    clock: Callable[[], float] = time.time,
    tools: ToolServer | None = None,
    peers: Peers | None = None,
    leaving: Callable[[], bool] = lambda: False,
    ring: KeyRing | None = None,
    processes: Processes = lambda: {"server": os.getpid()},
    tracing: Tracing | None = None,
) -> ASGIApp:
    """The application around `manager`. `ring`: the keys, None: those of the config; `processes`: of the
    server; `info`, `tools`, `peers`, `leaving`: see ServerContext."""
    config.verify()
    ring = KeyRing(config) if ring is None else ring
    model = manager.model
    name = next(iter(config.served_names), model.served_name)
    metrics = Metrics(name, config.metric_names, processes)
    metrics.observe_keys(ring)
    manager.observe(metrics.requests)
    if tracing is not None:
        manager.observe(tracing)
    ctx = ServerContext(
        manager, model, config, metrics, clock, dict(info or {}), tools, peers or Peers(), leaving
    )
    described = describe(secured=ring.secured)
    pages = Pages(ctx, described, secured=ring.secured)
    routes = [route for group in (*(kind(ctx) for kind in MODULES), pages) for route in group.routes()]
    gate = Gate(Paths(routes), config, metrics.http, SHAPES, ring=ring, orders=ORDERS, tracing=tracing)
    return with_cors(gate, config)


def describe(secured: bool = False) -> dict[str, Any]:
    """The OpenAPI document of all routes. `secured`: an API key is required."""
    this = {"GET /openapi.json": Operation("This document", response={"type": "object"})}
    tables: list[Mapping[str, Operation]] = [this, *(group.OPENAPI for group in MODULES)]
    return document("sglang-dsl runtime", version(), tables, secured)
