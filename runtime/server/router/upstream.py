"""Upstream: HTTP/1.1 requests to the workers, over connections that are kept for the next ones.

Every wait has a deadline, and every failure is a WorkerFailed with the worker's address. Taking and returning
a connection costs the same however many there are. Reading stops while what has come is not read, so that a
slow client slows its worker down. The workers' API key is written into requests and nowhere else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import h11

from runtime.config.serving.router import RouterConfig
from runtime.processes.frontend.client import CLIENT
from runtime.protocol.errors import WorkerFailed
from runtime.server.http.limits import FLOW_HEADER
from runtime.server.router.pool import Worker

T = TypeVar("T")
IDLE_S = 30.0
"""How long an unused connection is kept: less than servers keep theirs, which could close one just when it is
used again."""
READ_BYTES = 64 << 10
MOST_HEADERS = 64 << 10
PORTS = {"http": 80, "https": 443}
MOST_ERROR = 64 << 10
"""Bytes of an error's body that are read."""
DROPPED = frozenset(
    {
        "host", "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer",
        "transfer-encoding", "upgrade", "content-length", "accept-encoding", "expect", "origin", "cookie",
    }
)  # fmt: skip
"""Headers of a request that are for the router alone. Origin: it has checked that."""
KEYS = frozenset({"authorization", "x-api-key"})
NOT_BACK = DROPPED | {"server", "date", "access-control-allow-origin"}
"""Headers of an answer that the router sets itself."""


class ClientError(Exception):
    """A request failed; the message completes "the worker ..."."""


class Silence(ClientError):
    """Nothing came, or was accepted, for too long."""


class CannotConnect(ClientError):
    """The address refuses, or does not exist."""


class BrokenOff(ClientError):
    """The connection ended before the answer, or what came is not HTTP."""


class SilentWorker(WorkerFailed):
    """Nothing came in time: the worker may have died, or be very busy."""


class Response:
    """status, headers (lower case; the last one of each name), and the body, to be read once."""

    def __init__(self, connection: _Connection, head: h11.Response) -> None:
        self.status = head.status_code
        self.raw = list(head.headers)
        self.headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in self.raw}
        self._connection = connection

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises BrokenOff, Silence."""
        while (piece := await self._connection.piece()) is not None:
            yield piece


class Upstream:
    """`async with` it: the connections are closed at the end."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._key = None if config.worker_api_key is None else config.worker_api_key.strip()
        self._clients: dict[str, Client] = {}

    async def __aenter__(self) -> Upstream:
        return self

    async def __aexit__(self, *_: object) -> None:
        for one in self._clients.values():
            one.close()
        self._clients = {}

    @property
    def keyed(self) -> bool:
        """Whether the router has a key of its own for the workers."""
        return self._key is not None

    def headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """A client's headers as a worker gets them: with the worker's key, if the router has one, else with
        the client's, unless that is the router's; and with the label of the client's flow."""
        no_keys = self._key is not None or self._config.api_key is not None
        dropped = DROPPED | KEYS if no_keys else DROPPED
        kept = {name: value for name, value in headers.items() if name not in dropped}
        if self._key is not None:
            kept["authorization"] = f"Bearer {self._key}"
        kept.pop(FLOW_HEADER, None)
        if (flow := CLIENT.get().flow) is not None:
            kept[FLOW_HEADER] = flow
        return kept

    @contextlib.asynccontextmanager
    async def asking(
        self,
        worker: Worker,
        method: str,
        target: str,
        *,
        headers: Mapping[str, str],
        body: bytes = b"",
        patience: float | None = None,
        counted: bool = True,
    ) -> AsyncIterator[Response]:
        """The answer, once its headers are there; the body is read within the block. Leaving it before the
        end closes the connection, which cancels the request at the worker.

        target: path and query; patience: seconds for all of it, None: as long as the worker sends something
        now and then; counted: it counts as a request in the worker's hands. Raises WorkerFailed, also out of
        reading the body; SilentWorker if nothing came in time."""
        limit = asyncio.timeout(patience)
        try:
            async with limit:
                with worker.handling(limit) if counted else contextlib.nullcontext():
                    async with self._client(worker).asking(
                        method, target, self.headers(headers), body
                    ) as response:
                        yield response
        except TimeoutError:
            why = worker.abandoned if patience is None else f"did not answer within {patience:g} s"
            raise SilentWorker(why, where=worker.name) from None
        except Silence as error:
            raise SilentWorker(str(error), where=worker.name) from None
        except ClientError as error:
            raise WorkerFailed(str(error), where=worker.name) from None

    def forget(self, worker: Worker) -> None:
        """It gets no more requests: close its connections once they are unused."""
        if worker.name in self._clients:
            self._clients.pop(worker.name).close()

    def _client(self, worker: Worker) -> Client:
        if worker.name not in self._clients:
            config = self._config
            self._clients[worker.name] = Client(
                worker.name, config.connect_timeout_s, config.silence_timeout_s
            )
        return self._clients[worker.name]


class Client:
    """One worker's connections. url: http or https, with a path that comes before every target."""

    def __init__(self, url: str, connect_timeout_s: float, silence_timeout_s: float) -> None:
        parts = urlsplit(url)
        self._host, self._prefix = parts.hostname or "", parts.path
        self._port = parts.port or PORTS[parts.scheme]
        self._authority = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_s, self._silence_s = connect_timeout_s, silence_timeout_s
        self._idle: list[_Connection] = []  # the least recently used first
        self._closed = False

    @contextlib.asynccontextmanager
    async def asking(
        self, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> AsyncIterator[Response]:
        """The answer, once its headers are there. The connection is kept if the body was read to its end
        within the block, else closed. Raises ClientError."""
        connection = self._take() or await self._connect()
        try:
            pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
            pairs += [(b"host", self._authority), (b"accept-encoding", b"identity")]
            head = await connection.ask(method, self._prefix + target, pairs, body)
            yield Response(connection, head)
        finally:
            if connection.recycle() and not self._closed:
                self._idle.append(connection)
            else:
                connection.cut()

    def close(self) -> None:
        """Close the idle connections; those in use are closed after it."""
        self._closed = True
        idle, self._idle = self._idle, []
        for one in idle:
            one.cut()

    def _take(self) -> _Connection | None:
        """The most recently used one, so that those that are not needed expire."""
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                while self._idle and not self._idle[0].usable:
                    self._idle.pop(0).cut()
                return connection
            connection.cut()
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_s):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, limit=READ_BYTES, ssl=self._tls
                )
        except TimeoutError:
            raise Silence(f"took no connection within {self._connect_s:g} s") from None
        except (OSError, UnicodeError) as error:
            raise CannotConnect(f"cannot be reached: {reason_of(error)}") from None
        return _Connection(reader, writer, self._silence_s)


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence_s: float) -> None:
        self._reader, self._writer, self._silence_s = reader, writer, silence_s
        self._state = h11.Connection(h11.CLIENT, MOST_HEADERS)
        self._loop = asyncio.get_running_loop()
        self._used = self._loop.time()

    @property
    def usable(self) -> bool:
        """Whether the worker has not closed it, as far as is known."""
        fresh = self._loop.time() - self._used < IDLE_S
        return fresh and not self._reader.at_eof() and not self._writer.transport.is_closing()

    async def ask(
        self, method: str, target: str, headers: Sequence[tuple[bytes, bytes]], body: bytes
    ) -> h11.Response:
        length = (b"content-length", str(len(body)).encode())
        request = h11.Request(method=method, target=target, headers=[*headers, length])
        events: tuple[h11.Event, ...] = (request, h11.Data(data=body), h11.EndOfMessage())
        with _broken_off():
            self._writer.write(b"".join(self._state.send(one) or b"" for one in events))
            await self._within_silence(self._writer.drain())
        while True:
            event = await self._next()
            if isinstance(event, h11.Response):
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise BrokenOff("broke off: the connection ended without a response")

    async def piece(self) -> bytes | None:
        """The next piece of the body; None at its end."""
        while True:
            event = await self._next()
            if isinstance(event, h11.Data):
                if event.data:
                    return bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                return None
            else:
                raise BrokenOff("broke off: the connection ended in the middle of the response")

    def recycle(self) -> bool:
        """Prepare for another request. False if that is not possible."""
        if self._state.our_state is not h11.DONE or self._state.their_state is not h11.DONE:
            return False
        self._state.start_next_cycle()
        self._used = self._loop.time()
        return self.usable

    def cut(self) -> None:
        self._writer.transport.abort()

    async def _next(self) -> Any:
        with _broken_off():
            while (event := self._state.next_event()) is h11.NEED_DATA:
                self._state.receive_data(await self._within_silence(self._reader.read(READ_BYTES)))
        return event

    async def _within_silence(self, wait: Awaitable[T]) -> T:
        limit = asyncio.timeout(self._silence_s)
        try:
            async with limit:
                return await wait
        except TimeoutError:
            if limit.expired():
                raise Silence(f"said nothing for {self._silence_s:g} s") from None
            raise


@contextlib.contextmanager
def _broken_off() -> Iterator[None]:
    try:
        yield
    except (h11.RemoteProtocolError, OSError) as error:
        raise BrokenOff(f"broke off: {reason_of(error)}") from None


def reason_of(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


async def read_some(response: Response, most: int = MOST_ERROR) -> bytes:
    """The body, or its first `most` bytes."""
    parts, size = [], 0
    async for part in response.pieces():
        parts.append(part)
        size += len(part)
        if size > most:
            break
    return b"".join(parts)[:most]


def headers_back(response: Response) -> list[tuple[bytes, bytes]]:
    """The answer's headers as the client gets them."""
    return [(name, value) for name, value in response.raw if name.decode("latin-1") not in NOT_BACK]
