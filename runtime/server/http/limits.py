"""Gate: the middleware that every request and answer passes. It counts, checks (API key, origin, concurrent
requests), logs, and turns errors into answers. Knows no route; shapes of errors are a table of path prefixes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.config.serving.server import ServerConfig
from runtime.processes.frontend.client import CLIENT, IN_HAND, Client, ClientRequest, flow_label
from runtime.processes.frontend.encoding import Shares
from runtime.processes.supervise.logs import ACCESS, FIELDS, REQUEST_ID
from runtime.protocol.errors import InternalFault, Overloaded, RuntimeFault
from runtime.server.http.auth import OPEN_PATHS, Access
from runtime.server.http.errors import error_body, error_headers, forget_frames, from_http, json_response
from runtime.server.http.ignored import IgnoredFields, open_record
from runtime.server.http.keys import KeyRing
from runtime.server.http.metrics import HttpMetrics
from runtime.server.observe.tracing import Tracing

logger = logging.getLogger(__name__)
access_log = logging.getLogger(ACCESS)

ErrorShape = Callable[[RuntimeFault], Mapping[str, Any]]
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
"""Labels of metrics; others are "other", since clients can send any method."""
WORK = frozenset({"POST", "PUT"})
"""Methods of requests that count against a key's limits."""
FLOW_HEADER = "x-sglang-dsl-flow"
"""The client of a router or gateway for which a request is. A key of a client overrides it."""
UNLIMITED = OPEN_PATHS | {"/metrics"}
"""Paths that are answered however busy the server is."""


HEADER = "x-request-id"
MAX_ID = 100
"""Characters of a client's id, at most: with its name it fits into an exemplar (OpenMetrics 1.0: 128)."""
_ID = re.compile(rf"[A-Za-z0-9._:/@+=~-]{{1,{MAX_ID}}}")


class Gate:
    """An ASGI application around the router. `shapes`: (path prefix, function for the body of an error) for
    other shapes than the common one. ring: the keys; None: those of the config. orders: see Access."""

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        metrics: HttpMetrics,
        shapes: Sequence[tuple[str, ErrorShape]] = (),
        *,
        ring: KeyRing | None = None,
        orders: Collection[str] = (),
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._app, self._metrics, self._shapes = app, metrics, tuple(shapes)
        ring = KeyRing(config) if ring is None else ring
        self._access = Access(config, ring, orders)
        self._orders = frozenset(orders)
        self._bodies = Shares(config.max_bodies_bytes, "bytes of requests", "max_bodies_bytes")
        self._limit = config.max_concurrent_requests
        self._ignore = config.unknown_fields == "ignore"
        self._active = 0

    @property
    def active(self) -> int:
        return self._active

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = REQUEST_ID.set(identity := request_id(Headers(scope=scope).get(HEADER)))
        header = HEADER.encode(), identity.encode()
        # What passes the request on passes on its id.
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != header[0]] + [header]
        scope["app"] = self  # for an application, Starlette's router raises errors instead of answering them
        sent = _Sent(send, header, open_record(self._ignore))
        began = time.monotonic()
        self._active += 1
        self._metrics.began()
        try:
            tracing = None if scope["path"] in UNLIMITED else self._tracing
            with contextlib.nullcontext() if tracing is None else tracing.request(scope) as span:
                try:
                    await self._answer(scope, receive, sent)
                finally:
                    self._active -= 1
                    method = scope["method"] if scope["method"] in METHODS else "other"
                    route = scope.get("route")
                    path = "other" if route is None else str(route.path)
                    seconds = max(0.0, time.monotonic() - began)
                    self._metrics.ended(method, path, sent.status, seconds)
                    log_access(scope, sent.status, seconds, sent.size)
                    if tracing is not None:
                        tracing.answered(span, method, path, sent.status)
        finally:
            REQUEST_ID.reset(token)

    async def _answer(self, scope: Scope, receive: Receive, sent: _Sent) -> None:
        path = scope["path"]
        try:
            headers = Headers(scope=scope)
            key = self._access.check(scope["method"], path, headers)
            if key is None or key.client is None:
                flow = headers.get(FLOW_HEADER)
                client = Client(
                    scope["client"][0] if scope.get("client") else "",
                    sees_all=self._access.sees_all(key),
                    flow=flow_label(flow) if flow else None,
                )
            else:
                client = key.client
            CLIENT.set(client)
            if self._active > self._limit and path not in UNLIMITED:
                raise Overloaded(
                    f"too many concurrent requests; at most {self._limit} are allowed",
                    hint="try again; max_concurrent_requests",
                )
            # Clients at their limit must be able to cancel requests.
            cancels = path == "/abort_request" or path.endswith("/cancel")
            if path in self._orders or scope["method"] not in WORK or cancels:
                await self._app(scope, receive, sent)
                return
            sent.headers = client.headers
            in_hand = ClientRequest(client)
            IN_HAND.set(in_hand)
            body = _Body(receive, self._bodies, client.name)
            try:
                await self._app(scope, body, sent)
            finally:
                in_hand.done()
                body.give_back()
        except HTTPException as error:
            await self._refuse(from_http(error), scope, receive, sent, dict(error.headers or {}))
        except RuntimeFault as fault:
            await self._refuse(fault, scope, receive, sent)
        except Exception as error:
            # A defect: the details are only in the log.
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
        headers = {**(headers or {}), **error_headers(fault)}
        response: Response = json_response(self._shape(scope["path"])(fault), fault.status, headers)
        await response(scope, receive, sent)
        forget_frames(fault)

    def _shape(self, path: str) -> ErrorShape:
        for prefix, shape in self._shapes:
            if path.startswith(prefix):
                return shape
        return error_body


def with_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """The application, with answers that web pages of `cors_origins` may read."""
    if not config.cors_origins:
        return app
    origins = list(config.cors_origins)
    return CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


class _Body:
    """Passes on what is received, and counts it against `shares` until the request ends: the body's values
    live as long."""

    def __init__(self, receive: Receive, shares: Shares, client: str) -> None:
        self._receive, self._shares, self._client = receive, shares, client
        self._held = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if size := len(message.get("body", b"")):
            self._shares.take(self._client, size)
            self._held += size
        return message

    def give_back(self) -> None:
        if self._held:
            self._shares.give_back(self._client, self._held)
            self._held = 0


class _Sent:
    """Passes on what is sent, with `header`, a warning of ignored fields and the client's `headers`;
    remembers status and size of the body."""

    def __init__(self, send: Send, header: tuple[bytes, bytes], ignored: IgnoredFields) -> None:
        self._send, self._header, self._ignored = send, header, ignored
        self.status: int | None = None
        self.headers: Callable[[], Mapping[str, str]] = dict
        self.size = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
            others = [pair for pair in message.get("headers", ()) if pair[0].lower() != self._header[0]]
            added = [(name.encode(), value.encode()) for name, value in self.headers().items()]
            if (warning := self._ignored.header()) is not None:
                added.append((b"warning", warning))
            message = {**message, "headers": [*others, *added, self._header]}
        else:
            self.size += len(message.get("body", b""))
        await self._send(message)


def request_id(header: str | None) -> str:
    """The client's own if it is a plain word; else a new one."""
    return header if header is not None and _ID.fullmatch(header) else os.urandom(16).hex()


def log_access(scope: Scope, status: int | None, seconds: float, size: int) -> None:
    """One line, if these are logged. status: None if the client disconnected before an answer; size: bytes of
    the answer's body. Queries may contain secrets, and are not logged."""
    if access_log.disabled or not access_log.isEnabledFor(logging.INFO):
        return
    client = scope.get("client")
    facts: dict[str, Any] = {
        "client": None if client is None else client[0],
        "method": scope["method"],
        "path": quote(scope["path"]),
        "status": status or 499,
        "duration_ms": round(seconds * 1000, 3),
        "bytes": size,
    }
    access_log.info("%(client)s %(method)s %(path)s %(status)d %(duration_ms).1f ms %(bytes)d bytes", facts,
             extra={FIELDS: facts})  # fmt: skip
