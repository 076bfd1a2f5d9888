"""build_app: routes, middleware and the OpenAPI document, put together into one ASGI application."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.config.serving.server import ServerConfig
from runtime.processes.frontend.tokenizer_manager import TokenizerManager
from runtime.protocol.console import version
from runtime.server.anthropic import routes as anthropic
from runtime.server.context import RouteModule, ServerContext
from runtime.server.http.errors import json_response
from runtime.server.http.keys import KeyRing
from runtime.server.http.limits import Gate
from runtime.server.http.metrics import Metrics
from runtime.server.http.openapi import Operation, document
from runtime.server.http.peers import Peers
from runtime.server.native import control, generate, info, introspection, pages, parsing, sleep, verbs
from runtime.server.observe.families import Processes
from runtime.server.observe.tracing import Tracing
from runtime.server.ollama import routes as ollama
from runtime.server.openai import chat, completions, embeddings, models, scores, tokenize
from runtime.server.openai.responses import routes as responses
from runtime.tools import ToolServer

MODULES: tuple[RouteModule, ...] = (
    generate, tokenize, parsing, info, introspection, control, sleep, verbs, models, completions, chat,
    embeddings, scores, responses, anthropic, ollama,
)  # fmt: skip
SHAPES = tuple((prefix, api.error_body) for api in (anthropic, ollama) for prefix in api.PREFIXES)
"""Beginnings of the paths whose errors look otherwise, and how."""


class Paths(Router):
    """A Router that finds routes without parameters in one step, and all else as usual."""

    def __init__(self, routes: Sequence[Route]) -> None:
        super().__init__(routes)
        plain = [route for route in reversed(routes) if not route.param_convertors]  # the first one counts
        self._plain = {(method, route.path): route for route in plain for method in route.methods or ()}

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http" and not scope.get("root_path"):
            found = self._plain.get((scope["method"], scope["path"]))
        if found is None:
            await super().app(scope, receive, send)
            return
        scope.update(router=self, route=found, endpoint=found.endpoint, path_params={})
        await found.handle(scope, receive, send)


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
    """The application around `manager`. `info`: the options the server was started with, for /server_info (no
    secrets); `tools`: those that it runs; `peers`: the other HTTP processes; `leaving`: whether the server is
    about to end; `ring`: the keys, None: those of the config; `processes`: all that it consists of;
    `tracing`: where spans go."""
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
    routes = [route for module in MODULES for route in module.routes(ctx)]
    described = describe(secured=ring.secured)

    routes += pages.routes(ctx, described, secured=ring.secured)

    async def openapi(_: Request) -> Response:
        return json_response(described)

    routes.append(Route("/openapi.json", openapi, methods=["GET"]))
    app: ASGIApp = Gate(
        Paths(routes), config, metrics.http, SHAPES, ring=ring, orders=verbs.ORDERS, tracing=tracing
    )
    if config.cors_origins:
        app = CORSMiddleware(
            app, allow_origins=list(config.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


def describe(secured: bool = False) -> dict[str, Any]:
    """The OpenAPI document of all routes. `secured`: an API key is asked for."""
    own = {"GET /openapi.json": Operation("This document", response={"type": "object"})}
    tables: list[Mapping[str, Operation]] = [own, *(module.OPENAPI for module in MODULES)]
    return document("sglang-dsl runtime", version(), tables, secured)
