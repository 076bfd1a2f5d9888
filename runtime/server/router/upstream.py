"""Upstream: the HTTP client to the workers. Every wait of it has a deadline, and every failure is a
WorkerFailed with the worker's address. The workers' API key is written into requests and nowhere else.
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
"""Headers of an answer that the router says for itself."""


class SilentWorker(WorkerFailed):
    """Nothing came in time: it may have died without a word, or be very busy."""


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
        """Whether it has a key of its own for the workers."""
        return self._key is not None

    def headers(self, given: Mapping[str, str]) -> dict[str, str]:
        """A client's headers as a worker gets them: with the worker's key, where the router has one; else
        with the client's own, unless that is the router's; and with the label of whose turn it takes."""
        own = self._key is not None or self._config.api_key is not None
        kept = {
            name: value for name, value in given.items() if name not in DROPPED and not (own and name in KEYS)
        }
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
        """The answer, once its headers are there; the body is read within. target: path and query; patience:
        seconds for all of it, None: as long as the worker says something now and then; counted: it is work
        for the worker. When the block is left before its end the connection is closed, which cancels the
        request at the worker.

        Raises WorkerFailed, also out of reading the body; SilentWorker where nothing came in time."""
        limit = asyncio.timeout(patience)
        try:
            async with limit:
                with worker.handling(limit) if counted else contextlib.nullcontext():
                    async with self._client(worker).asking(
                        method, target, self.headers(headers), body
                    ) as response:
                        yield response
        except TimeoutError:
            why = worker.given_up if patience is None else f"did not answer within {patience:g} s"
            raise SilentWorker(why, where=worker.name) from None
        except ConnectTimeout:
            why = f"took no connection within {self._config.connect_timeout_s:g} s"
            raise SilentWorker(why, where=worker.name) from None
        except Silence:
            why = f"said nothing for {self._config.silence_timeout_s:g} s"
            raise SilentWorker(why, where=worker.name) from None
        except CannotConnect as error:
            raise WorkerFailed(f"cannot be reached: {error}", where=worker.name) from None
        except BrokenOff as error:
            raise WorkerFailed(f"broke off: {error}", where=worker.name) from None

    def forget(self, worker: Worker) -> None:
        """It gets no more requests; its connections are closed once none is in its hands any more."""
        if worker.name in self._clients:
            self._clients.pop(worker.name).close()

    def _client(self, worker: Worker) -> Client:
        if worker.name not in self._clients:
            config = self._config
            self._clients[worker.name] = Client(
                worker.name, config.connect_timeout_s, config.silence_timeout_s
            )
        return self._clients[worker.name]


async def read_some(response: Response, most: int = MOST_ERROR) -> bytes:
    """The body, or what there is of it within `most` bytes."""
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
