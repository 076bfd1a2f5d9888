"""The HTTP server around an application: uvicorn, with deadlines for clients that send or read nothing. Knows
no route, no process and no signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import resource
from collections import OrderedDict
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from runtime.config.serving.server import ServerConfig

try:
    from uvloop import new_event_loop as new_event_loop
except ImportError:  # it is not built for every system
    from asyncio import new_event_loop as new_event_loop  # type: ignore[assignment]

log = logging.getLogger(__name__)

OTHER_FILES = 256
"""Files that a process has open besides its connections: libraries, pipes, sockets between processes, and
connections that are accepted before an excess one is closed."""
FLUSH_S = 5.0
"""How long error answers may take to be sent at the end."""
MAX_HEADER_BYTES = 32 << 10
MAX_PIPELINED = 32
"""Requests that may wait on one connection; further ones are refused."""
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
)
_BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: %d\r\n\r\n%b"
)
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connections:
    """The open ones, at most `limit`: for a new one, the one that has been idle longest is closed, so that
    idle connections cannot exclude clients. If none is idle, the new one is closed."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: OrderedDict[PatientProtocol, None] = OrderedDict()
        self.closed = 0

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: PatientProtocol) -> None:
        self._open[connection] = None
        if len(self._open) > self.limit:
            idle = next(
                (one for one in self._open if not one.answering and one is not connection), connection
            )
            del self._open[idle]
            self.closed += 1
            idle.refuse()

    def used(self, connection: PatientProtocol) -> None:
        """It is the most recently used one now."""
        if connection in self._open:
            self._open.move_to_end(connection)

    def remove(self, connection: PatientProtocol) -> None:
        self._open.pop(connection, None)


class Unacceptable(Exception):
    """Raised to the parser: the request is not read further, and its client gets a 400, or `_refusal`."""


class PatientProtocol(HttpToolsProtocol):
    """HTTP/1.1 with deadlines: a request's headers must arrive within header_timeout_s, and answers must be
    read within stall_timeout_s; else the connection is closed, which cancels its requests. Headers have at
    most MAX_HEADER_BYTES; trailers of a chunked body are ignored."""

    def __init__(self, limits: ServerConfig, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._connections = connections
        self._limits = limits
        self._headers_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None
        self._current: RequestResponseCycle | None = None
        """The request that is being answered; `cycle` is the last one that was read."""
        self._half_sent = False
        """Whether part of a request has been read."""
        self._in_headers, self._header_bytes = False, 0
        self._advanced, self._unparsed_bytes = False, 0
        self._refusal: bytes | None = None
        """The last answer of the connection, after those to earlier requests. Nothing is parsed any more."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._expect_headers()
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing() or self._refusal is not None:
            return  # what came before it was refused
        self._connections.used(self)
        self._advanced = False
        self._unset_keepalive_if_required()
        self._parse(data)
        self._unparsed_bytes = 0 if self._advanced else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("A line of the request is too long.")  # the parser keeps its beginning
        if self.answering or not self._half_sent:
            self._stop_headers_timer()
        elif self._headers_due is None and not self.transport.is_closing():
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_headers_timer()
        self._stop_reading_timer()
        self._connections.remove(self)
        self.pipeline.clear()
        if self._current is not None:
            self.cycle = self._current  # uvicorn reports the end to this one
        super().connection_lost(exc)

    def refuse(self) -> None:
        """Close the connection, which is idle: there are too many."""
        self._end(_TOO_MANY)

    def send_400_response(self, msg: str) -> None:
        """Refuse what was read last, and all that follows. Earlier requests are answered first."""
        if self._refusal is None:
            self._refusal = _BAD_REQUEST % (len(msg), msg.encode("ascii"))
        current = self._current
        if current is not None and not current.response_complete:
            if not current.more_body:
                if self.pipeline and self.pipeline[0][0].more_body:
                    self.pipeline.popleft()  # the rest of its body was wrong
                return
            if current.response_started:
                self.transport.close()  # its own answer has begun
                return
            current.disconnected = True  # its body was wrong, and this is the answer
            current.message_event.set()
        self._end(self._refusal)

    def _end(self, answer: bytes) -> None:
        self.transport.write(answer)
        self.transport.close()
        self._expect_reading()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as stop:
                # The parser leaves the body to the proposed protocol. The request is parsed again without the
                # proposal, which Java's client and curl --http2 send.
                data = self._head_again() + data[stop.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError as error:
                log.info("not HTTP: %s", error.__context__ or error)
                self.send_400_response("Invalid HTTP request received.")
                return

    def _head_again(self) -> bytes:
        """The request's head without the proposed protocol."""
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    # -- callbacks of the parser

    def on_message_begin(self) -> None:
        self._half_sent = self._in_headers = self._advanced = True
        self._header_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._advanced = True
        if self._in_headers:
            self._count(len(name) + len(value))
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._advanced = True
        if self.parser.get_method() == b"CONNECT":
            raise Unacceptable("this is no proxy")
        if self.parser.should_upgrade():
            return  # see _parse
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise Unacceptable(f"HTTP/{version} is not spoken here")
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts != 1 and (hosts or version == "1.1"):
            raise Unacceptable("the request must name one host")
        if len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = _TOO_MANY
            raise Unacceptable("too many requests wait on this connection")
        super().on_headers_complete()
        if self.answering:
            self.flow.resume_reading()  # else the client's disconnection would not be noticed
        else:
            self._current = self.cycle

    def on_body(self, body: bytes) -> None:
        self._advanced = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._advanced = True
        if not self.parser.should_upgrade():
            self._half_sent = False
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self._current = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self._current is None and self._refusal is not None and not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self._end(self._refusal)

    def _count(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise Unacceptable("the headers are too long")

    # -- deadlines

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._stop_reading_timer()
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._expect_reading()  # closing waits for the client to read the rest

    def shutdown(self) -> None:
        super().shutdown()
        if not self.answering:
            self._expect_reading()

    @property
    def answering(self) -> bool:
        """Whether a request is being read or answered."""
        return self._current is not None and not self._current.response_complete

    def _expect_headers(self) -> None:
        self._headers_due = self.loop.call_later(self._limits.header_timeout_s, self._headers_missing)

    def _headers_missing(self) -> None:
        self._headers_due = None
        if not self.answering and not self.transport.is_closing():
            self._end(_TOO_SLOW)

    def _stop_headers_timer(self) -> None:
        if self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _stop_reading_timer(self) -> None:
        if self._reading_due is not None:
            self._reading_due.cancel()
            self._reading_due = None

    def _expect_reading(self) -> None:
        if self._reading_due is None:
            self._reading_due = self.loop.call_later(self._limits.stall_timeout_s, self.transport.abort)


def make_server(app: ASGIApp, config: ServerConfig) -> uvicorn.Server:
    """A server for `await server.serve(sockets=[...])`. `server.should_exit = True` ends it: it accepts no
    new connections, and running requests have drain_timeout_s."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=functools.partial(PatientProtocol, config, Connections(connection_limit(config))),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # the gate logs requests
            server_header=False,
            proxy_headers=bool(config.forwarded_allow_ips),
            forwarded_allow_ips=list(config.forwarded_allow_ips),
            timeout_keep_alive=max(1, math.ceil(config.keep_alive_s)),
            timeout_graceful_shutdown=math.ceil(config.drain_timeout_s),
        )
    )


def set_drain(server: uvicorn.Server, seconds: float) -> None:
    """Give running requests this time when the server ends, and then FLUSH_S for error answers."""
    server.config.timeout_graceful_shutdown = math.ceil(seconds + FLUSH_S)


def connection_limit(config: ServerConfig) -> int:
    """How many connections may be open: max_connections, or fewer if the system limits open files. Raises
    that limit as far as possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = config.max_connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return config.max_connections
    limit = max(1, soft - min(OTHER_FILES, soft // 2))
    log.warning(
        "only %d files may be open here, so at most %d connections are kept instead of %d (ulimit -n %d)",
        soft, limit, config.max_connections, needed,
    )  # fmt: skip
    return limit
