"""Client: HTTP/1.1 requests to one worker, over connections that are kept for the next ones.

Made for many at once: taking and giving back a connection costs the same however many there are. Reading is
paused while nobody takes what has come, so that a slow reader holds the worker back.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11

T = TypeVar("T")
IDLE_S = 30.0
"""How long an unused connection is kept: less than servers keep theirs, which else would close it just when
it is used again."""
READ_BYTES = 64 << 10
MOST_HEADERS = 64 << 10
PORTS = {"http": 80, "https": 443}


class ConnectTimeout(Exception):
    """No connection was taken in time."""


class CannotConnect(Exception):
    """The address refuses, or does not exist."""


class Silence(Exception):
    """Nothing came, or nothing was taken, for too long."""


class BrokenOff(Exception):
    """The connection ended before the answer, or what came is no HTTP."""


class Response:
    """status, headers (lower case; of several with one name the last), and the body, to be read once."""

    def __init__(self, connection: _Connection, head: h11.Response) -> None:
        self.status = head.status_code
        self.raw = list(head.headers)
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.raw}
        self._connection = connection

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises BrokenOff, Silence."""
        while (piece := await self._connection.piece()) is not None:
            yield piece


class Client:
    """url: http or https, with a path that comes before every target. Seconds: see RouterConfig."""

    def __init__(self, url: str, connect_timeout_s: float, silence_timeout_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._prefix = parts.hostname or "", parts.path
        self._port = parts.port or PORTS[parts.scheme]
        self._authority = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_s, self._silence_s = connect_timeout_s, silence_timeout_s
        self._idle: list[_Connection] = []
        self._closed = False

    @contextlib.asynccontextmanager
    async def asking(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[Response]:
        """The answer, once its headers are there. The connection is kept when the body was read to its end
        within the block; else it is cut. Raises ConnectTimeout, CannotConnect, BrokenOff, Silence."""
        connection = self._take() or await self._connect()
        try:
            given = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
            given += [(b"host", self._authority), (b"accept-encoding", b"identity")]
            head = await connection.ask(method, self._prefix + target, given, body)
            yield Response(connection, head)
        finally:
            if connection.recycle() and not self._closed:
                self._idle.append(connection)
            else:
                connection.cut()

    def close(self) -> None:
        """Keep no connection any more; those in use are cut after it."""
        self._closed = True
        idle, self._idle = self._idle, []
        for one in idle:
            one.cut()

    def _take(self) -> _Connection | None:
        """The one that was used last, so that those that are not needed grow old."""
        while self._idle:
            found = self._idle.pop()
            if found.usable:
                self._drop_old()
                return found
            found.cut()
        return None

    def _drop_old(self) -> None:
        """The oldest are in front."""
        while self._idle and not self._idle[0].usable:
            self._idle.pop(0).cut()

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, limit=READ_BYTES, ssl=self._tls
                )
        except TimeoutError:
            raise ConnectTimeout from None
        except (OSError, UnicodeError) as error:
            raise CannotConnect(reason_of(error)) from None
        return _Connection(reader, writer, self._silence_s)


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence_s: float) -> None:
        self._reader, self._writer, self._silence_s = reader, writer, silence_s
        self._state = h11.Connection(h11.CLIENT, MOST_HEADERS)
        self._loop = asyncio.get_running_loop()
        self._used = self._loop.time()

    @property
    def usable(self) -> bool:
        """Whether the other side still has it, as far as is known."""
        fresh = self._loop.time() - self._used < IDLE_S
        return fresh and not self._reader.at_eof() and not self._writer.transport.is_closing()

    async def ask(
        self, method: str, target: str, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> h11.Response:
        request = h11.Request(
            method=method, target=target, headers=[*headers, (b"content-length", str(len(body)).encode())]
        )
        events: tuple[h11.Event, ...] = (request, h11.Data(data=body), h11.EndOfMessage())
        with _named():
            self._writer.write(b"".join(self._state.send(one) or b"" for one in events))
            await self._patiently(self._writer.drain())
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise BrokenOff("the connection ended without a response")

    async def piece(self) -> bytes | None:
        """The next of the body; None at its end."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                if event.data:
                    return bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return None
            else:
                raise BrokenOff("the connection ended in the middle of the response")

    def recycle(self) -> bool:
        """Get ready for another request. False when it is of no use any more."""
        if self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        self._used = self._loop.time()
        return self.usable

    def cut(self) -> None:
        self._writer.transport.abort()

    async def _next(self) -> Any:
        with _named():
            while (event := self._state.next_event()) is h11.NEED_DATA:
                self._state.receive_data(await self._patiently(self._reader.read(READ_BYTES)))
        return event

    async def _patiently(self, wait: Awaitable[T]) -> T:
        limit = asyncio.timeout(self._silence_s)
        try:
            async with limit:
                return await wait
        except TimeoutError:
            if limit.expired():
                raise Silence from None
            raise


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except (h11.RemoteProtocolError, OSError) as error:
        raise BrokenOff(reason_of(error)) from None


def reason_of(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
