"""Gate: what every request passes before its route, and every answer after it.

Counts, lets in or turns away (API key, foreign pages, requests at once), and turns what a route raises into
an answer. Knows no route; how an error looks is a table of path prefixes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.config.serving.server import ServerConfig
from runtime.protocol.errors import InternalFault, RuntimeFault
from runtime.server.http.auth import OPEN_PATHS, HostCheck, KeyCheck, OriginCheck
from runtime.server.http.errors import Overloaded, error_body, error_headers, from_http, json_response
from runtime.server.http.metrics import HttpMetrics

logger = logging.getLogger(__name__)

ErrorShape = Callable[[RuntimeFault], Mapping[str, Any]]
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
UNLIMITED = OPEN_PATHS | {"/metrics"}
"""Paths that are answered however busy the server is."""


class Gate:
    """An ASGI application around the router. `shapes`: (path prefix, error as JSON); others look the common
    way."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        metrics: HttpMetrics,
        shapes: Sequence[tuple[str, ErrorShape]] = (),
    ) -> None:
        self._app, self._metrics, self._shapes = app, metrics, tuple(shapes)
        self._keys, self._origins, self._hosts = KeyCheck(config), OriginCheck(config), HostCheck(config)
        self._limit = config.max_concurrent_requests
        self._active = 0

    @property
    def active(self) -> int:
        """Requests that are being answered."""
        return self._active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["app"] = self  # the router raises its refusals for an application, instead of answering them
        sent = _Sent(send)
        began = time.monotonic()
        self._active += 1
        self._metrics.began()
        try:
            await self._answer(scope, receive, sent)
        finally:
            self._active -= 1
            self._metrics.ended(
                _method(scope), _template(scope), sent.status, max(0.0, time.monotonic() - began)
            )

    async def _answer(self, scope: Scope, receive: Receive, sent: _Sent) -> None:
        path = scope["path"]
        try:
            headers = Headers(scope=scope)
            self._hosts.check(path, headers)
            self._keys.check(scope["method"], path, headers)
            self._origins.check(scope["method"], headers)
            if self._active > self._limit and path not in UNLIMITED:
                raise Overloaded(
                    f"{self._limit} requests are being answered", hint="try again; max_concurrent_requests"
                )
            await self._app(scope, receive, sent)
        except HTTPException as error:
            await self._refuse(from_http(error), scope, receive, sent, dict(error.headers or {}))
        except RuntimeFault as fault:
            await self._refuse(fault, scope, receive, sent)
        except Exception as error:
            # A defect: the client gets no details of the inside, the log has all.
            logger.exception("%s %s failed", scope["method"], path)
            defect = InternalFault(
                f"the server failed to answer: {type(error).__name__}", hint="a defect; see the server's log"
            )
            await self._refuse(defect, scope, receive, sent)

    async def _refuse(
        self,
        fault: RuntimeFault,
        scope: Scope,
        receive: Receive,
        sent: _Sent,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        if sent.status is not None:
            raise fault  # the answer is under way: the connection is cut, so that it cannot look complete
        made = {**(headers or {}), **error_headers(fault)}
        response: Response = json_response(self._shape(scope["path"])(fault), fault.status, made)
        await response(scope, receive, sent)

    def _shape(self, path: str) -> ErrorShape:
        for prefix, shape in self._shapes:
            if path.startswith(prefix):
                return shape
        return error_body


class _Sent:
    """Passes on what is sent, and remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
        await self._send(message)


def _method(scope: Scope) -> str:
    """Clients may invent methods without end; a label must not follow them."""
    return scope["method"] if scope["method"] in METHODS else "other"


def _template(scope: Scope) -> str:
    """The route's path, parameters unfilled; "other" for paths that do not exist, which are endless."""
    route = scope.get("route")
    return "other" if route is None else str(route.path)
