"""Relay: one request on its way to a worker, and to another one when that fails before the first token.

When the client goes, the connection to the worker is closed, which cancels the request there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from runtime.protocol.errors import Aborted, NoWorker, Overloaded, QueueFull, TransferLate, WorkerFailed
from runtime.server.http.sse import while_connected
from runtime.server.router.answer import MOST_MERGED, Answer, Order, Refusal, refusal_of
from runtime.server.router.merge import Merge, decoded, merge_for
from runtime.server.router.metrics import RouterMetrics
from runtime.server.router.pool import Pool, Worker
from runtime.server.router.upstream import Response, Upstream, read_some

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
        await answered_while_connected(Request(scope, receive), answer, self._try_all(answer))

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


async def answered_while_connected(request: Request, answer: Answer, work: Coroutine[Any, Any, None]) -> None:
    """Do `work`; what it raises becomes the request's end. When the client goes, it is cancelled. Raises what
    cannot be told in the answer."""
    try:
        await while_connected(request, _answered(answer, work))
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


WHOLE = ("session_id", "session_params", "return_hidden_states", "choices")
"""Fields of requests that one engine must answer alone."""
MOST_ROOMS = 1 << 32
"""More than one request has prompts and samples: each has a room of its own, counted from the first on."""
GRACE_S = 10.0
"""How long a prefill server may take to end its answer after the decode server's."""


def splits(body: Mapping[str, Any]) -> bool:
    """Whether a request is answered by a pair; else a decode server does all of it."""
    return not any(body.get(name) for name in WHOLE)


class Tails:
    """The ends of prefill answers, which nobody waits for."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[bytes]] = set()

    def add(self, task: asyncio.Task[bytes]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        task.get_loop().call_later(GRACE_S, task.cancel)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[bytes]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # it was judged; nobody else is interested


class PairRelay:
    """An ASGI application for one request. body: decoded."""

    def __init__(
        self,
        order: Order,
        body: Mapping[str, Any],
        pools: tuple[Pool, Pool],
        upstream: Upstream,
        metrics: RouterMetrics,
        retries: int,
        tails: Tails,
    ) -> None:
        self._order, self._body, self._upstream = order, body, upstream
        self._prefills, self._decodes = pools
        self._metrics, self._retries, self._tails = metrics, retries, tails
        self._merging = merge_for(order.target.partition("?")[0], body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = Answer(self._order, self._metrics, send)
        await answered_while_connected(Request(scope, receive), answer, self._try_all(answer))

    async def _try_all(self, answer: Answer) -> None:
        tried: list[tuple[Worker, Worker]] = []
        failed: set[Worker] = set()
        last: Exception | None = None
        for _ in range(self._retries + 1):
            if last is not None and (self._order.left_s or 1.0) <= 0:
                raise last
            try:
                prefill, decode = self._choose(tried, failed, again=last is not None)
            except NoWorker:
                if last is not None:
                    raise last from None
                raise
            tried.append((prefill, decode))
            try:
                await self._attempt(prefill, decode, answer)
                return
            except (WorkerFailed, Refusal) as error:
                if answer.begun or is_final(error):
                    raise
                if not (isinstance(error, Refusal) and error.code.startswith(TRANSFER)):
                    failed |= {one for one in (prefill, decode) if one.name == blamed(error)}
                last = error
        assert last is not None
        raise last

    def _choose(
        self, tried: list[tuple[Worker, Worker]], failed: set[Worker], *, again: bool
    ) -> tuple[Worker, Worker]:
        """A pair that was not tried, of workers that have not failed. Raises NoWorker."""
        able = [one for one in self._decodes.workers if one.available and one not in failed]
        spent = {
            one for one in self._prefills.workers if able and all((one, other) in tried for other in able)
        }
        asked = self._order.asked
        prefill = self._prefills.choose(asked, failed | spent)
        partners = {other for one, other in tried if one is prefill.worker}
        decode = self._decodes.choose(asked, failed | partners)
        for choice in (prefill, decode):
            self._metrics.sent(choice.worker, choice.why, again=again)
        return prefill.worker, decode.worker

    async def _attempt(self, prefill: Worker, decode: Worker, answer: Answer) -> None:
        """Raises WorkerFailed, Refusal; the one of the two that came first."""
        bodies = self._bodies(prefill)
        task = asyncio.create_task(self._prefill(prefill, bodies[0]), name="sglang-dsl-prefill")
        try:
            async with failing_with(task, lambda: answer.begun):
                await self._decode(decode, bodies[1], answer, prefill, task)
        except BaseException:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        self._tails.add(task)

    async def _decode(
        self, worker: Worker, body: bytes, answer: Answer, prefill: Worker, task: asyncio.Task[bytes]
    ) -> None:
        async def merge() -> Merge:
            assert self._merging is not None
            return self._merging(decoded(prefill, await asyncio.shield(task)))

        order, began = self._order, time.monotonic()
        with judged(worker, self._decodes, self._metrics):
            async with self._upstream.asking(
                worker, order.method, order.target, headers=order.headers, body=body
            ) as response:
                await check(worker, response, keyed=self._upstream.keyed)
                await answer.pass_on(worker, response, began, None if self._merging is None else merge)

    async def _prefill(self, worker: Worker, body: bytes) -> bytes:
        """Its whole answer, where that is merged into the other one."""
        order = self._order
        with judged(worker, self._prefills, self._metrics):
            async with self._upstream.asking(
                worker, order.method, order.target, headers=order.headers, body=body
            ) as response:
                await check(worker, response, keyed=self._upstream.keyed)
                if response.status >= 400:
                    raise await refusal_of(worker, response, final=True)
                if self._merging is not None:
                    return await read_some(response, MOST_MERGED)
                async for _ in response.pieces():
                    pass
                return b""

    def _bodies(self, prefill: Worker) -> tuple[bytes, bytes]:
        """For prefill and decode: the client's, and where they find each other. Nobody reads what the prefill
        side would stream."""
        room = 1 + secrets.randbelow((1 << 63) - 1 - MOST_ROOMS)
        made = {
            **self._body,
            "bootstrap_host": prefill.bootstrap_host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": room,
        }
        if (left := self._order.left_s) is not None:
            made["timeout_s"] = max(left, 0.001)
        whole = {name: value for name, value in made.items() if name not in ("stream", "stream_options")}
        return msgspec.json.encode(whole), msgspec.json.encode(made)


@contextlib.asynccontextmanager
async def failing_with(task: asyncio.Task[bytes], unless: Callable[[], bool]) -> AsyncIterator[None]:
    """The block ends with what `task` raises, when that comes first; not any more once `unless` is true."""
    raised: list[BaseException] = []
    inside = True

    def ended(done: asyncio.Task[bytes]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None and inside and not unless() and not limit.expired():
            raised.append(error)
            limit.reschedule(asyncio.get_running_loop().time())

    try:
        async with asyncio.timeout(None) as limit:
            task.add_done_callback(ended)
            try:
                yield
            finally:
                inside = False  # where the task has just ended, the callback comes all the same
                task.remove_done_callback(ended)
    except TimeoutError:
        if not raised:
            raise
        raise raised[0] from None


def blamed(error: WorkerFailed | Refusal) -> str | None:
    """The name of the worker that failed."""
    return error.worker.name if isinstance(error, Refusal) else error.where
