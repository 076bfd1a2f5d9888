"""The HTTP server around an application: uvicorn, with deadlines for clients that say or read nothing.

Knows no route, no process and no signal: who runs it, on which socket and until when, is decided above.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import resource
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from runtime.config.serving.server import ServerConfig

log = logging.getLogger(__name__)

OTHER_FILES = 256
"""What a process has open besides its connections: libraries, pipes, sockets between processes, and those
that are accepted at once before one of them is closed."""
MAX_HEADER_BYTES = 32 << 10
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-length: 0\r\n\r\n"
)
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(h11.Connection):
    """h11's, with a short way for the pieces of a chunked body: a stream has one per token, and they change
    no state."""

    _chunked = False

    def send(self, event: h11.Event) -> bytes | None:  # type: ignore[override]
        if type(event) is h11.Data and self._chunked and self.our_state is h11.SEND_BODY:
            data = event.data
            return b"".join((b"%x\r\n" % len(data), data, b"\r\n")) if data else b""
        made = super().send(event)
        if type(event) is h11.Response:
            # The whole line: the value of another header may hold these words.
            self._chunked = made is not None and b"\r\ntransfer-encoding: chunked\r\n" in made.lower()
        return made


class Connections:
    """The open ones, at most `limit`: for one more, the one that has waited for a request for longest is
    closed, so that idle ones cannot keep anybody out. Where all are being answered, the new one is."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: dict[PatientProtocol, None] = {}
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
        """It comes last in the order now."""
        if self._open.pop(connection, self) is None:
            self._open[connection] = None

    def remove(self, connection: PatientProtocol) -> None:
        self._open.pop(connection, None)


class PatientProtocol(H11Protocol):
    """HTTP/1.1 whose patience ends: a request's headers must come within header_timeout_s, and what was sent
    must be read within stall_timeout_s; else the connection is cut, which ends what it asked for. What waits
    to be read is bounded by the transport's high-water mark, for each connection by itself."""

    def __init__(self, limits: ServerConfig, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._connections = connections
        self.conn = Connection(h11.SERVER, MAX_HEADER_BYTES)
        self._limits = limits
        self._headers_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._expect_headers()
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # what came before it was refused
        self._connections.used(self)
        super().data_received(data)
        if self.answering or not self._half_sent:
            self._stop_headers_timer()
        elif self._headers_due is None and not self.transport.is_closing():
            self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_headers_timer()
        self._stop_reading_timer()
        self._connections.remove(self)
        super().connection_lost(exc)

    def refuse(self) -> None:
        """There are too many connections, and nothing is being answered on this one."""
        self.transport.write(_TOO_MANY)
        self.transport.close()
        self._expect_reading()

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
        """Whether a request is under way, its body or its answer."""
        return _under_way(self.cycle)

    @property
    def _half_sent(self) -> bool:
        """Whether the client is in the middle of headers, or of a body that was answered before its end."""
        return bool(self.conn.trailing_data[0]) or self.conn.their_state is h11.SEND_BODY

    def _expect_headers(self) -> None:
        self._headers_due = self.loop.call_later(self._limits.header_timeout_s, self._headers_missing)

    def _headers_missing(self) -> None:
        self._headers_due = None
        if not self.answering and not self.transport.is_closing():
            self.transport.write(_TOO_SLOW)
            self.transport.close()
            self._expect_reading()

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
    """A server for `await server.serve(sockets=[...])`; `server.should_exit = True` ends it: it takes no new
    connection, and finishes requests in hand for at most drain_timeout_s. Logs go where the process's logging
    sends them."""
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            http=functools.partial(PatientProtocol, config, Connections(room_for_connections(config))),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,  # its lines say no more than ours
            server_header=False,
            proxy_headers=bool(config.forwarded_allow_ips),
            forwarded_allow_ips=list(config.forwarded_allow_ips),
            timeout_keep_alive=max(1, math.ceil(config.keep_alive_s)),
            timeout_graceful_shutdown=math.ceil(config.drain_timeout_s),
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
    )


def room_for_connections(config: ServerConfig) -> int:
    """How many connections may be open: max_connections, or fewer where the system lets this process open
    fewer files. Raises the limit of open files as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = config.max_connections + OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return config.max_connections
    room = max(1, soft - min(OTHER_FILES, soft // 2))
    log.warning(
        "only %d files may be open here, so at most %d connections are kept instead of %d (ulimit -n %d)",
        soft, room, config.max_connections, wanted,
    )  # fmt: skip
    return room


def _under_way(cycle: RequestResponseCycle | None) -> bool:
    return cycle is not None and not cycle.response_complete
