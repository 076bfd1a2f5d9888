"""Relay: one request on its way to a worker, and to another one when that fails before the first token.

When the client goes, the connection to the worker is closed, which cancels the request there.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from runtime.protocol.errors import Aborted, NoWorker, Overloaded, QueueFull, TransferLate, WorkerFailed
from runtime.server.http.sse import unless_gone
from runtime.server.router.answer import Answer, Order, Refusal, refusal_of
from runtime.server.router.client import Response
from runtime.server.router.metrics import RouterMetrics
from runtime.server.router.pool import Pool, Worker
from runtime.server.router.upstream import Upstream

log = logging.getLogger(__name__)

_BUSY = frozenset({QueueFull.code, Overloaded.code})
TRANSFER = "transfer_"
"""How the codes of errors begin that two workers have with each other."""


class Relay:
    """An ASGI application for one request, whose body has been read."""

    def __init__(
        self, order: Order, pool: Pool, upstream: Upstream, metrics: RouterMetrics, retries: int
    ) -> None:
        self._order, self._pool, self._upstream = order, pool, upstream
        self._metrics, self._retries = metrics, retries

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(self._order, self._metrics, send)
        await while_connected(Request(scope, receive), answer, self._try_all(answer))

    async def _try_all(self, answer: Answer) -> None:
        failed: list[Worker] = []
        last: Exception | None = None
        for _ in range(self._retries + 1):
            body = self._order.body if last is None else later(self._order, last)
            try:
                choice = self._pool.choose(self._order.asked, failed)
            except NoWorker:
                if last is not None:
                    raise last from None
                raise
            worker = choice.worker
            self._metrics.sent(worker, choice.why, again=last is not None)
            try:
                with judged(worker, self._pool, self._metrics):
                    await self._attempt(worker, body, answer)
                return
            except (WorkerFailed, Refusal) as error:
                if answer.begun or is_final(error):
                    raise
                failed.append(worker)
                last = error
        assert last is not None
        raise last

    async def _attempt(self, worker: Worker, body: bytes, answer: Answer) -> None:
        """Raises WorkerFailed, Refusal."""
        order, began = self._order, time.monotonic()
        async with self._upstream.asking(
            worker, order.method, order.target, headers=order.headers, body=body
        ) as response:
            await check(worker, response, keyed=self._upstream.keyed)
            await answer.pass_on(worker, response, began)


async def while_connected(request: Request, answer: Answer, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`; what it raises becomes the request's end. When the client goes, it is cancelled. Raises what
    cannot be told in the answer."""
    try:
        await unless_gone(request, _answered(answer, work))
    except Aborted:
        if not answer.started:
            raise


async def _answered(answer: Answer, work: Coroutine[Any, Any, None]) -> None:
    try:
        await work
    except Refusal as refusal:
        await answer.refuse(refusal)
    except (WorkerFailed, NoWorker) as fault:
        await answer.fail(fault)


def later(order: Order, last: Exception) -> bytes:
    """The body for another attempt: its timeout_s is what is left of that. Raises `last` when nothing is."""
    left = order.left_s
    if left is None:
        return order.body
    if left <= 0:
        raise last
    return msgspec.json.encode({**msgspec.json.decode(order.body), "timeout_s": left})


def is_final(error: WorkerFailed | Refusal) -> bool:
    """Whether no other worker may do better."""
    return isinstance(error, Refusal) and error.final


async def check(worker: Worker, response: Response, *, keyed: bool) -> None:
    """Raise Refusal for an answer that another worker may do better; WorkerFailed when the worker turns the
    router's own key down, which is not the client's business."""
    if keyed and response.status in (401, 403):
        raise WorkerFailed("does not accept the router's key (worker_api_key)", where=worker.name)
    if response.status in (502, 503):
        raise await refusal_of(worker, response)
    if response.status == 504:
        refusal = await refusal_of(worker, response)
        refusal.final = refusal.code != TransferLate.code
        raise refusal


@contextlib.contextmanager
def judged(worker: Worker, pool: Pool, metrics: RouterMetrics) -> Iterator[None]:
    """What the block raises, or does not, decides whether the worker gets more requests."""
    try:
        yield
    except (WorkerFailed, Refusal) as error:
        kind = _kind(error)
        if kind == "final":
            worker.answered()
            raise
        metrics.failed(worker, kind)
        fault = error.fault if isinstance(error, Refusal) else error
        if kind == "failed" and worker.failed(fault.message):
            log.warning("%s gets no requests for a while: %s", worker.name, fault.message)
            pool.forget(worker)
        raise
    else:
        worker.answered()


def _kind(error: WorkerFailed | Refusal) -> str:
    """failed; busy, and may do the next one; transfer: which of the two is to blame is not known; final: it
    answered, and that is all."""
    if isinstance(error, WorkerFailed):
        return "failed"
    if error.code in _BUSY:
        return "busy"
    if error.code.startswith(TRANSFER):
        return "transfer"
    return "final" if error.final else "failed"
