"""Server-sent events: their bytes, and a response that sends them until the client or the request is done;
and work that is cancelled when its client disconnects. What events contain is up to the caller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from runtime.protocol.errors import Aborted, InternalFault, RuntimeFault
from runtime.server.http.errors import error_body

T = TypeVar("T")

logger = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still working\n\n"
"""A comment; clients skip it, and proxies see that the connection lives."""
_NO_COMMENTS = "aiohttp/"
"""In the user agent of a client without a parser of events: programs that use it (sglang's and vLLM's
benchmarks) read each line as data, and fail on comments."""
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def event(data: Any, name: str | None = None) -> bytes:
    """One event: `data` (builtins, dataclasses or msgspec structs) as one line of JSON, after an `event:`
    line if it has a name. JSON escapes line ends, so data stays on its line."""
    body = msgspec.json.encode(data)
    if name is None:
        return b"data: " + body + b"\n\n"
    return b"event: " + name.encode() + b"\ndata: " + body + b"\n\n"


def fault_event(fault: RuntimeFault) -> bytes:
    """An error inside a stream of native or OpenAI events; [DONE] follows it."""
    return event({"error": error_body(fault)["error"]}) + DONE


async def disconnected(receive: Receive) -> None:
    """Return when the client is gone. The request's body must have been read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns or raises; it is cancelled and Aborted raised if the client disconnects first."""
    task = asyncio.create_task(work, name="sglang-dsl-answer")
    left = asyncio.create_task(disconnected(request.receive), name="sglang-dsl-answer-watch")
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Aborted("the client disconnected")
    finally:
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


class EventStream(Response):
    """Sends what `events` yields: whole events as bytes, the closing [DONE] included.

    An error before the first event is raised, so that it is answered with its own status; a later one is sent
    as `on_fault` formats it, and ends the stream. When the client disconnects, `events` is closed at once,
    which cancels what it waits for. After `keep_alive_s` seconds (0: never) without an event a comment is
    sent, unless the client cannot read one (_NO_COMMENTS).
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        keep_alive_s: float,
        on_fault: Callable[[RuntimeFault], bytes] = fault_event,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, 200, {**HEADERS, **(headers or {})})
        self._wire_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]
        self._events, self._keep_alive_s, self._on_fault = events, keep_alive_s, on_fault
        self._sending = asyncio.Lock()
        self._started = self._busy = False
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._sent_at = time.monotonic()
        silence = 0.0 if _NO_COMMENTS in Headers(scope=scope).get("user-agent", "") else self._keep_alive_s
        work = asyncio.create_task(self._send_all(send), name="sglang-dsl-stream")
        left = asyncio.create_task(disconnected(receive), name="sglang-dsl-stream-watch")
        try:
            while not work.done() and not left.done():
                wait = max(0.0, self._sent_at + silence - time.monotonic()) if silence else None
                done, _ = await asyncio.wait({work, left}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                if done or time.monotonic() < self._sent_at + silence:
                    continue
                if self._busy or self._sending.locked():
                    self._sent_at = time.monotonic()  # the client reads slowly: wait for another period
                else:
                    await self._send_piece(send, KEEP_ALIVE)
            if work.done():
                await work
        finally:
            for task in (work, left):
                task.cancel()
            await asyncio.gather(work, left, return_exceptions=True)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        """Send all events; raise what happens before the first."""
        try:
            async for piece in self._events:
                if not self._started or self._sending.locked():
                    await self._send_piece(send, piece)
                    continue
                # The same without the lock, which would cost more than the rest: there is one for each token.
                self._busy = True
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                self._sent_at, self._busy = time.monotonic(), False
        except Exception as error:
            if not self._started:
                raise
            if not isinstance(error, RuntimeFault):  # a defect: the log gets it, too
                logger.exception("a stream failed")
                error = InternalFault(f"{type(error).__name__}: {error}", hint="a defect of the runtime")
            await self._send_piece(send, self._on_fault(error))
        await self._send_piece(send, b"", last=True)

    async def _send_piece(self, send: Send, piece: bytes, last: bool = False) -> None:
        """The headers first, before the first piece. One piece at a time: comments come in between."""
        async with self._sending:
            if not self._started:
                self._started = True
                start: Message = {"type": "http.response.start", "status": 200, "headers": self._wire_headers}
                await send(start)
            await send({"type": "http.response.body", "body": piece, "more_body": not last})
            self._sent_at = time.monotonic()
