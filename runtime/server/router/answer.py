"""Answer: passes a worker's answer on to the client, bytes as they come, no faster than the client reads.

Streams are passed on in whole events: one that breaks off can be ended by an event that reports it, and
one of which only comments were sent can be begun again by another worker.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp
from starlette.types import Send

from runtime.protocol.errors import RuntimeFault, WorkerFailed
from runtime.server.http.sse import HEADERS as STREAM_HEADERS
from runtime.server.router.merge import Merge
from runtime.server.router.metrics import RouterMetrics
from runtime.server.router.pool import RequestFacts, Worker
from runtime.server.router.upstream import field_of, headers_back, json_of, read_some

MOST_HELD = 1 << 20
"""Bytes of an event whose end has not come. A longer one is passed on in pieces."""
_COMMENTS = re.compile(rb"(?:(?::[^\r\n]*)?\r?\n)*")


class WholeEvents:
    """Feed it the pieces of one worker's stream."""

    def __init__(self) -> None:
        self._held = b""
        self.begun = False
        """Whether there was an event: anything besides comments."""
        self.torn = False
        """Whether the client has a part of an event whose rest is missing."""

    def feed(self, piece: bytes) -> bytes:
        """What can be passed on now, b"" for nothing."""
        data = self._held + piece
        end = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        if self.torn or len(data) - end > MOST_HELD:
            end = len(data)
        whole, self._held = data[:end], data[end:]
        if whole:
            self.torn = not whole.endswith(b"\n\n")
            self.begun = self.begun or not _COMMENTS.fullmatch(whole)
        return whole

    def rest(self) -> bytes:
        """What is left when the stream has ended as it should."""
        held, self._held = self._held, b""
        return held


MOST_WHOLE = 1 << 20
"""Bytes of an answer that are held until its end, so that another worker can still give it. Longer ones are
passed on as they come."""
MOST_MERGED = 64 << 20
"""Bytes of an answer that another one is merged into."""
_STREAM = [(name.encode(), value.encode()) for name, value in STREAM_HEADERS.items()]
ErrorEvent = Callable[[RuntimeFault], bytes]
LazyMerge = Callable[[], Awaitable[Merge]]
"""Awaited, once an answer has begun, for what is merged into it."""
Learn = Callable[[RequestFacts, Worker, bytes], None]


@dataclass(frozen=True, slots=True)
class Order:
    """A request to pass on. target: path and query; on_fault: formats an error inside a stream; learn: called
    with the beginning of the worker's answer, once that is there."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    facts: RequestFacts
    on_fault: ErrorEvent
    learn: Learn | None = None
    arrived: float = field(default_factory=time.monotonic)

    @property
    def left_s(self) -> float | None:
        """Seconds left of its timeout_s, None if it has none."""
        limit = self.facts.timeout_s
        return None if limit is None else self.arrived + limit - time.monotonic()


class Refusal(WorkerFailed):
    """A worker's own answer, which another worker may improve on, unless it is `final`. answer_code: of the
    error in it."""

    def __init__(
        self, worker: Worker, response: aiohttp.ClientResponse, body: bytes, *, final: bool = False
    ) -> None:
        error = field_of(json_of(body), "error")
        message = field_of(error, "message") or f"answered {response.status}"
        super().__init__(str(message), where=worker.name)
        self.answer_status, self.headers, self.body = response.status, headers_back(response), body
        self.answer_code, self.final = str(field_of(error, "code") or ""), final


async def refusal_of(worker: Worker, response: aiohttp.ClientResponse, *, final: bool = False) -> Refusal:
    return Refusal(worker, response, await read_some(response), final=final)


class Answer:
    def __init__(self, order: Order, metrics: RouterMetrics, send: Send) -> None:
        self._order, self._metrics, self._send = order, metrics, send
        self.started = False
        self._torn = False
        self.begun = False
        """Whether more was sent than comments: then no other worker can give the answer."""

    async def pass_on(
        self, worker: Worker, response: aiohttp.ClientResponse, began: float, merge: LazyMerge | None = None
    ) -> None:
        """Send the worker's answer to a request of the time `began` (time.monotonic()). Raises WorkerFailed;
        Refusal if this is no stream, and the client has received the beginning of one."""
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            await self._pass_events(worker, response, began, merge)
        else:
            await self._pass_whole(worker, response, began, merge)

    async def fail(self, fault: RuntimeFault) -> None:
        """End the request with this error, or with the worker's own answer. Raises it if there is none and
        nothing was sent yet, or if the client has part of an event: then the connection is closed, so that
        the answer cannot look complete."""
        if isinstance(fault, Refusal) and not self.started:
            await self._whole(fault.answer_status, fault.headers, fault.body)
        elif not self.started or self._torn:
            raise fault
        else:
            await self._body(self._order.on_fault(fault), more=False)

    # -- streams ---------------------------------------------------------------------------------------------

    async def _pass_events(
        self, worker: Worker, response: aiohttp.ClientResponse, began: float, merge: LazyMerge | None
    ) -> None:
        events, merging = WholeEvents(), None
        async for piece in response.content.iter_any():
            data = events.feed(piece)
            if not data:
                continue
            if events.begun:
                if not self.begun:
                    self._first(worker, data, began)
                    merging = None if merge is None else await merge()
                self.begun = True
                data = data if merging is None else merging.events(data)
            if not self.started:
                await self._start(200, _STREAM)
            self._torn = events.torn
            await self._body(data)
        if not self.started:
            await self._start(200, _STREAM)
        self.begun = True
        await self._body(events.rest(), more=False)

    # -- whole answers ---------------------------------------------------------------------------------------

    async def _pass_whole(
        self, worker: Worker, response: aiohttp.ClientResponse, began: float, merge: LazyMerge | None
    ) -> None:
        headers, parts, size = headers_back(response), [], 0
        most = MOST_WHOLE if merge is None else MOST_MERGED
        pieces = response.content.iter_any()
        async for piece in pieces:
            parts.append(piece)
            size += len(piece)
            if size > most:
                break
        body, good = b"".join(parts), response.status < 400
        if self.started:  # by the comments of a worker that failed then
            raise Refusal(worker, response, body, final=True)
        if good:
            self._first(worker, body, began)
        if size > most:
            self.begun = self._torn = True
            await self._start(response.status, headers)
            await self._body(body)
            async for piece in pieces:
                await self._body(piece)
            await self._body(b"", more=False)
            return
        if good and merge is not None:
            body = (await merge()).whole(body)
        await self._whole(response.status, headers, body)

    async def _whole(self, status: int, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> None:
        self.begun = True
        await self._start(status, [*headers, (b"content-length", str(len(body)).encode())])
        await self._body(body, more=False)

    # -- the wire --------------------------------------------------------------------------------------------

    def _first(self, worker: Worker, beginning: bytes, began: float) -> None:
        self._metrics.first(worker, time.monotonic() - began)
        if self._order.learn is not None:
            self._order.learn(self._order.facts, worker, beginning)

    async def _start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def _body(self, data: bytes, more: bool = True) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
