"""Relays: one request on its way to a worker, or to a pair of prefill and decode servers, and to others when
those fail before the first token. When the client disconnects, the connections to the workers are closed,
which cancels the request there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from runtime.protocol.errors import Aborted, NoWorker, Overloaded, QueueFull, TransferLate, WorkerFailed
from runtime.server.http.sse import while_connected
from runtime.server.router.answer import MOST_MERGED, Answer, Order, Refusal, refusal_of
from runtime.server.router.merge import Merge, merge_for
from runtime.server.router.metrics import RouterMetrics
from runtime.server.router.pool import Choice, Pool, Worker
from runtime.server.router.upstream import Upstream, json_of, read_some

log = logging.getLogger(__name__)

_BUSY = frozenset({QueueFull.code, Overloaded.code})
TRANSFER = "transfer_"
"""The beginning of the codes of errors between two workers."""
WHOLE = ("session_id", "session_params", "return_hidden_states", "choices")
"""Fields of requests that one engine must answer alone."""
MOST_BOOTSTRAPS = 1 << 32
"""Prompts and samples of a request: each has a bootstrap number of its own, counted from the first on."""
GRACE_S = 10.0
"""How long a prefill server may take to end its answer after the decode server's."""


class Fleet(NamedTuple):
    """The workers, and the way to them. pools: of all workers, or of prefill and of decode servers; a worker
    of the last one can answer any request alone."""

    pools: Sequence[Pool]
    upstream: Upstream
    metrics: RouterMetrics
    retries: int
    tails: Tails


class Relay:
    """An ASGI application for one request, whose body has been read: one worker answers it."""

    def __init__(self, order: Order, fleet: Fleet) -> None:
        self._order, self._fleet = order, fleet
        self._failed: set[Worker] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what can no longer be put into the answer."""
        answer = Answer(self._order, self._fleet.metrics, send)
        try:
            await while_connected(Request(scope, receive), self._answered(answer))
        except Aborted:
            if not answer.started:
                raise

    async def _answered(self, answer: Answer) -> None:
        try:
            await self._try_all(answer)
        except (WorkerFailed, NoWorker) as fault:
            await answer.fail(fault)

    async def _try_all(self, answer: Answer) -> None:
        last: WorkerFailed | None = None
        for _ in range(self._fleet.retries + 1):
            left = self._order.left_s
            if last is not None and left is not None and left <= 0:
                raise last
            try:
                choices = self._choose()
            except NoWorker:
                if last is not None:
                    raise last from None
                raise
            for choice in choices:
                self._fleet.metrics.sent(choice.worker, choice.why, again=last is not None)
            workers = [choice.worker for choice in choices]
            try:
                await self._attempt(answer, workers, again=last is not None)
                return
            except WorkerFailed as error:
                if answer.begun or (isinstance(error, Refusal) and error.final):
                    raise
                self._exclude(workers, error)
                last = error
        assert last is not None
        raise last

    def _choose(self) -> Sequence[Choice]:
        """The workers of the next attempt. Raises NoWorker."""
        return [self._fleet.pools[-1].choose(self._order.facts, self._failed)]

    def _exclude(self, workers: Sequence[Worker], error: WorkerFailed) -> None:
        """After `error` of these workers: choose others from now on."""
        self._failed.update(workers)

    async def _attempt(self, answer: Answer, workers: Sequence[Worker], *, again: bool) -> None:
        """Raises WorkerFailed."""
        [worker], body, left = workers, self._order.body, self._order.left_s
        if again and left is not None:
            body = msgspec.json.encode({**msgspec.json.decode(body), "timeout_s": left})
        began = time.monotonic()
        async with self._asking(worker, self._fleet.pools[-1], body) as response:
            await answer.pass_on(worker, response, began)

    @contextlib.asynccontextmanager
    async def _asking(self, worker: Worker, pool: Pool, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        """The worker's answer. What becomes of it counts for the worker's circuit breaker."""
        order, upstream = self._order, self._fleet.upstream
        with judged(worker, pool, self._fleet.metrics):
            async with upstream.asking(
                worker, order.method, order.target, headers=order.headers, body=body
            ) as response:
                await check(worker, response, keyed=upstream.keyed)
                yield response


async def check(worker: Worker, response: aiohttp.ClientResponse, *, keyed: bool) -> None:
    """Raise Refusal for an answer that another worker may improve on; WorkerFailed when the worker rejects
    the router's own key, which is not the client's business."""
    if keyed and response.status in (401, 403):
        raise WorkerFailed("does not accept the router's key (worker_api_key)", where=worker.name)
    if response.status in (502, 503):
        raise await refusal_of(worker, response)
    if response.status == 504:
        refusal = await refusal_of(worker, response)
        refusal.final = refusal.answer_code != TransferLate.code
        raise refusal


@contextlib.contextmanager
def judged(worker: Worker, pool: Pool, metrics: RouterMetrics) -> Iterator[None]:
    """Report to the worker's circuit breaker whether the block failed."""
    try:
        yield
    except WorkerFailed as error:
        kind = _kind(error)
        if kind == "final":
            worker.answered()
            raise
        metrics.failed(worker, kind)
        if kind == "failed" and worker.failed(error.message):
            log.warning("%s gets no requests for a while: %s", worker.name, error.message)
            pool.forget(worker)
        raise
    else:
        worker.answered()


def _kind(error: WorkerFailed) -> str:
    """failed; busy: may do the next one; transfer: which of the two is to blame is not known; final: it
    answered, and that is all."""
    if not isinstance(error, Refusal):
        return "failed"
    if error.answer_code in _BUSY:
        return "busy"
    if error.answer_code.startswith(TRANSFER):
        return "transfer"
    return "final" if error.final else "failed"


# -- pairs ---------------------------------------------------------------------------------------------------


def splits(body: Mapping[str, Any]) -> bool:
    """Whether a pair can answer the request; else a decode server does all of it."""
    return not any(body.get(name) for name in WHOLE)


class Tails:
    """The ends of prefill answers, for which no request waits."""

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
            task.exception()  # retrieved: `judged` has reported it


class PairRelay(Relay):
    """A prefill and a decode server answer the request together. Both get the same body with the same
    bootstrap fields, by which they find each other; the decode server's answer is the client's. body:
    decoded."""

    def __init__(self, order: Order, body: Mapping[str, Any], fleet: Fleet) -> None:
        super().__init__(order, fleet)
        self._body = body
        self._tried: list[tuple[Worker, Worker]] = []
        self._merging = merge_for(order.target.partition("?")[0], body)

    def _choose(self) -> Sequence[Choice]:
        """A pair that was not tried, of workers that have not failed."""
        prefills, decodes = self._fleet.pools
        tried, failed, facts = self._tried, self._failed, self._order.facts
        able = [one for one in decodes.workers if one.available and one not in failed]
        exhausted = {one for one in prefills.workers if able and all((one, other) in tried for other in able)}
        prefill = prefills.choose(facts, failed | exhausted)
        partners = {other for one, other in tried if one is prefill.worker}
        decode = decodes.choose(facts, failed | partners)
        tried.append((prefill.worker, decode.worker))
        return prefill, decode

    def _exclude(self, workers: Sequence[Worker], error: WorkerFailed) -> None:
        if not (isinstance(error, Refusal) and error.answer_code.startswith(TRANSFER)):
            self._failed.update(one for one in workers if one.name == error.where)

    async def _attempt(self, answer: Answer, workers: Sequence[Worker], *, again: bool) -> None:
        """Raises WorkerFailed: that of the two which came first. Once the answer has begun, a
        failure of the prefill server no longer ends it."""
        prefill, decode = workers
        whole, streamed = self._bodies(prefill)
        first = asyncio.create_task(self._prefill(prefill, whole), name="sglang-dsl-prefill")
        second = asyncio.create_task(
            self._decode(decode, streamed, answer, prefill, first), name="sglang-dsl-decode"
        )
        try:
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and not answer.begun:
                first.result()
            await second
        except BaseException:
            first.cancel()
            second.cancel()
            await asyncio.gather(first, second, return_exceptions=True)
            raise
        self._fleet.tails.add(first)

    async def _decode(
        self, worker: Worker, body: bytes, answer: Answer, prefill: Worker, task: asyncio.Task[bytes]
    ) -> None:
        async def merge() -> Merge:
            assert self._merging is not None
            whole = json_of(await asyncio.shield(task))
            if whole is None:
                raise WorkerFailed("did not answer with JSON", where=prefill.name)
            return self._merging(whole)

        began = time.monotonic()
        async with self._asking(worker, self._fleet.pools[1], body) as response:
            await answer.pass_on(worker, response, began, None if self._merging is None else merge)

    async def _prefill(self, worker: Worker, body: bytes) -> bytes:
        """Its whole answer, if that is merged into the other one."""
        async with self._asking(worker, self._fleet.pools[0], body) as response:
            if response.status >= 400:
                raise await refusal_of(worker, response, final=True)
            if self._merging is not None:
                return await read_some(response, MOST_MERGED)
            async for _ in response.content.iter_any():
                pass
            return b""

    def _bodies(self, prefill: Worker) -> tuple[bytes, bytes]:
        """For prefill and decode: the client's body with the bootstrap fields. The prefill server's answer is
        not read as a stream."""
        body = {
            **self._body,
            "bootstrap_host": prefill.bootstrap_host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": 1 + secrets.randbelow((1 << 63) - 1 - MOST_BOOTSTRAPS),
        }
        if (left := self._order.left_s) is not None:
            body["timeout_s"] = max(left, 0.001)
        whole = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
        return msgspec.json.encode(whole), msgspec.json.encode(body)
