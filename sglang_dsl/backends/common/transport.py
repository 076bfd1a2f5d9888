"""HTTP for remote backends: one pooled client per event loop, deadlines, retries, server-sent events. A
request is sent again only if it cannot have begun: there was no connection, or the server refused it (503,
429).
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import weakref
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from sglang_dsl.concurrency.loop import running
from sglang_dsl.errors import BackendError, ProgramError, Timeout
from sglang_dsl.hooks import TRACEPARENT

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0
BUSY = frozenset({429, 503})
MAX_ERROR_BYTES = 1 << 20
MAX_EVENT_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds for a connection and between two pieces; retries; connections open at once."""

    connect_s: float = 10.0
    read_s: float = 600.0
    retries: int = 3
    connections: int = 256


class HttpFault(Exception):
    """An answer with an error status. `body`: its JSON, or its text."""

    def __init__(self, status: int, body: Any, retry_after_s: float | None = None) -> None:
        self.status, self.body, self.retry_after_s = status, body, retry_after_s
        super().__init__(f"status {status}")


@dataclass(eq=False)
class Transport:
    """One server. `base_url` with scheme; `headers` go with every request and are never shown.

    verify  False, or a certificate bundle's path, as httpx takes them
    traced  whether requests have the header `traceparent`, the span of the call
    """

    base_url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    verify: bool | str = True
    limits: Limits = Limits()
    name: str = "endpoint"
    traced: bool = False

    def __post_init__(self) -> None:
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            weakref.WeakKeyDictionary()
        )

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        """The JSON of a GET. Raises HttpFault, BackendError, Timeout."""
        return await self._whole("GET", path, None, timeout_s)

    async def post(self, path: str, body: bytes, timeout_s: float | None = None) -> Any:
        """The JSON of a POST. Raises HttpFault, BackendError, Timeout."""
        return await self._whole("POST", path, body, timeout_s)

    async def events(self, path: str, body: bytes, timeout_s: float | None = None) -> AsyncIterator[str]:
        """The data of each server-sent event, as they come. Leaving early closes the connection."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        decoder = EventDecoder()
        async with (
            aclosing(await self._begun("POST", path, body, deadline)) as answer,
            aclosing(answer.aiter_bytes()) as chunks,  # type: ignore[type-var]
        ):
            while True:
                with self._errors(path, timeout_s):
                    # Not wait_for(): it loses a cancellation that comes together with the chunk.
                    async with asyncio.timeout(self._wait_limit(deadline)):
                        chunk = await anext(chunks, None)
                for event in decoder.feed(chunk) if chunk is not None else decoder.end():
                    yield event
                if chunk is None:
                    return

    async def aclose(self) -> None:
        """Close the running loop's connections; those of other loops go with their loops."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    async def _whole(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> Any:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        async with aclosing(await self._begun(method, path, body, deadline)) as answer:
            with self._errors(path, timeout_s):
                async with asyncio.timeout(self._wait_limit(deadline)):
                    return _decoded(await answer.aread())

    async def _begun(
        self, method: str, path: str, body: bytes | None, deadline: float | None
    ) -> httpx.Response:
        """The response, with status 2xx. The request is sent again while it is refused."""
        attempt, refusal = 0, None
        while True:
            try:
                return await self._send(method, path, body, deadline)
            except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
                if not await self._may_retry(attempt, None, deadline):
                    if refusal is not None:
                        raise refusal from error  # it says more than a missing connection
                    raise BackendError(
                        f"no connection to {self.base_url}: {error or type(error).__name__}",
                        backend=self.name,
                        retryable=True,
                        hint="is the server running, and is the address right?",
                    ) from error
            except (TimeoutError, httpx.TimeoutException) as error:
                raise self._late(path, None) from error
            except httpx.InvalidURL as error:
                raise BackendError(f"{self.base_url!r} is not a URL: {error}") from error
            except httpx.HTTPError as error:
                raise refusal or self._broken(path, error) from error
            except HttpFault as fault:
                if fault.status not in BUSY or not await self._may_retry(
                    attempt, fault.retry_after_s, deadline
                ):
                    raise
                refusal = fault
            attempt += 1

    async def _send(
        self, method: str, path: str, body: bytes | None, deadline: float | None
    ) -> httpx.Response:
        client = self.client()
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self.traced and (parent := TRACEPARENT.get()) is not None:
            headers["traceparent"] = parent
        request = client.build_request(method, path, content=body, headers=headers)
        async with asyncio.timeout(self._wait_limit(deadline)):
            response = await client.send(request, stream=True)
        if response.is_success:
            return response
        content = b""
        async with aclosing(response):
            async for piece in response.aiter_bytes():
                content += piece
                if len(content) > MAX_ERROR_BYTES:
                    break
        raise HttpFault(
            response.status_code, _decoded(content), _seconds(response.headers.get("retry-after"))
        )

    async def _may_retry(self, attempt: int, retry_after_s: float | None, deadline: float | None) -> bool:
        """Wait before the next attempt; False if there is none, or no time for it."""
        if attempt >= self.limits.retries:
            return False
        pause = FIRST_PAUSE_S * 2**attempt if retry_after_s is None else retry_after_s
        pause = min(LONGEST_PAUSE_S, pause) * random.uniform(0.75, 1.25)
        if deadline is not None and time.monotonic() + pause >= deadline:
            return False
        await asyncio.sleep(pause)
        return True

    @contextmanager
    def _errors(self, path: str, timeout_s: float | None) -> Iterator[None]:
        try:
            yield
        except (TimeoutError, httpx.TimeoutException) as error:
            raise self._late(path, timeout_s) from error
        except httpx.HTTPError as error:
            raise self._broken(path, error) from error

    def client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            pool = httpx.Limits(
                max_connections=self.limits.connections, max_keepalive_connections=self.limits.connections
            )
            timeout = httpx.Timeout(self.limits.read_s, connect=self.limits.connect_s)
            client = httpx.AsyncClient(
                base_url=self.base_url,
                headers=dict(self.headers),
                verify=self.verify,
                limits=pool,
                timeout=timeout,
            )
            self._clients[loop] = client
            # A backend that is dropped, not closed, leaves no connection open.
            weakref.finalize(self, _close_later, loop, client).atexit = False
            ours = running()
            if ours is not None and ours.here:
                ours.close_with(self)
        return client

    def _wait_limit(self, deadline: float | None) -> float:
        if deadline is None:
            return self.limits.read_s
        return min(self.limits.read_s, max(0.0, deadline - time.monotonic()))

    def _late(self, path: str, timeout_s: float | None) -> Timeout:
        period = f"within {timeout_s:g} s" if timeout_s is not None else f"for {self.limits.read_s:g} s"
        return Timeout(
            f"{self.base_url}{path} gave no answer {period}",
            backend=self.name,
            retryable=True,
            hint="allow more time, or look at the server's load",
        )

    def _broken(self, path: str, error: httpx.HTTPError) -> ProgramError:
        return BackendError(
            f"the connection to {self.base_url}{path} broke: {type(error).__name__}: {error}".rstrip(": "),
            backend=self.name,
            retryable=True,
            hint="the server may have stopped; its log says why",
        )


_closing: set[asyncio.Task[None]] = set()
"""Tasks that close unused clients, until they are done."""


def _close_later(loop: asyncio.AbstractEventLoop, client: httpx.AsyncClient) -> None:
    """Close the client on its own loop, from any thread; a loop that has ended has closed its sockets."""

    def close() -> None:
        task = loop.create_task(client.aclose())
        _closing.add(task)
        task.add_done_callback(_closing.discard)

    if loop.is_running() and not client.is_closed:
        loop.call_soon_threadsafe(close)


class EventDecoder:
    """Bytes in any pieces -> the data of each server-sent event (WHATWG HTML)."""

    def __init__(self) -> None:
        self._bytes = b""
        self._began = False

    def feed(self, chunk: bytes) -> list[str]:
        """The events that are complete now. Raises BackendError for one of more than MAX_EVENT_BYTES."""
        self._bytes += chunk
        if not self._began and len(self._bytes) >= len(BOM_UTF8):
            self._began, self._bytes = True, self._bytes.removeprefix(BOM_UTF8)
        # A last \r may be the first half of a \r\n.
        half = b"\r" if self._bytes.endswith(b"\r") else b""
        lines = self._bytes.removesuffix(half).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = lines.split(b"\n\n")
        self._bytes = rest + half
        if len(self._bytes) > MAX_EVENT_BYTES:
            raise BackendError(f"one event of the stream has more than {MAX_EVENT_BYTES} bytes")
        return [data for event in events if (data := _data_of(event)) is not None]

    def end(self) -> list[str]:
        """The last event, if it was not ended by an empty line."""
        return self.feed(b"\n\n")


def _data_of(event: bytes) -> str | None:
    """Its fields `data`, one per line; None if there is none. Other fields and comments are ignored."""
    fields = [line.partition(b":") for line in event.split(b"\n")]
    data = [value.removeprefix(b" ") for name, _, value in fields if name == b"data"]
    return b"\n".join(data).decode("utf-8", "replace") if data else None


def json_event(text: str, backend: str) -> dict[str, Any]:
    """The JSON object in an event's data. Raises BackendError."""
    try:
        data = _parsed(text)
    except ValueError as error:
        raise BackendError(f"an event of the stream is not JSON: {text[:200]!r}", backend=backend) from error
    if not isinstance(data, dict):
        raise BackendError(f"an event of the stream is not an object: {text[:200]!r}", backend=backend)
    return data


def json_body(value: Any) -> bytes:
    """A request's body. msgspec takes 0.5 us for a short chat, json 9 us."""
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, TypeError):  # half a surrogate pair, or keys of other types
        return json.dumps(value).encode()


def _parsed(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError):
        return json.loads(text)  # which takes NaN, Infinity and half a surrogate pair, too


def _decoded(content: bytes) -> Any:
    try:
        return _parsed(content)
    except ValueError:
        return content.decode("utf-8", "replace")


def _seconds(text: str | None) -> float | None:
    """A Retry-After header in seconds; None for the date form."""
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None
