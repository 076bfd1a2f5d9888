"""Runs the slow part of long requests (templates, tokenising) beside the event loop, in turn for every client
and within bounds."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from runtime.processes.frontend.client import CLIENT
from runtime.protocol.errors import BadRequest, QueueFull

T = TypeVar("T")

THREADS = 2
"""Texts that are encoded at once; the library releases the interpreter's lock meanwhile."""
MOST_CHARACTERS = 64 << 20
PER_ITEM = 64
"""Characters that take as long to tokenise as an item takes besides."""


class Shares:
    """`most` units for all clients together, of which one client may hold half. what: the unit's name in
    errors; option: the name of the limit."""

    def __init__(self, most: int, what: str, option: str) -> None:
        self.most, self._what, self._option = most, what, option
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self.held = 0

    def take(self, name: str, count: int) -> None:
        """Raises QueueFull: there are not enough now; BadRequest: there never are."""
        share = self.most // 2
        with self._lock:
            held = self._held.get(name, 0)
            if held + count <= share and self.held + count <= self.most:
                self._held[name] = held + count
                self.held += count
                return
        if count > share:
            raise BadRequest(f"{count} {self._what} in one request; at most {share}", hint=self._option)
        whose = "of one client " if held + count > share else ""
        raise QueueFull(
            f"too many {self._what} {whose}are being processed", hint=f"try again later; {self._option}"
        )

    def give_back(self, name: str, count: int) -> None:
        with self._lock:
            left = self._held[name] - count
            self.held -= count
            if left:
                self._held[name] = left
            else:
                del self._held[name]


class EncodingPool:
    """`most`: characters that may wait or be encoded at once."""

    def __init__(self, most: int = MOST_CHARACTERS, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sglang-dsl-encode")
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self.shares = Shares(most, "characters to be encoded", "max_encode_chars")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, in the caller's context. Raises its errors, QueueFull and BadRequest."""
        name, context = CLIENT.get().name, copy_context()
        self.shares.take(name, size)
        try:
            future: Future[T] = Future()
            with self._lock:
                self._waiting.setdefault(name, deque()).append((future, partial(context.run, work)))
            self._pool.submit(self._next)
            return await asyncio.wrap_future(future)
        finally:
            self.shares.give_back(name, size)

    def _next(self) -> None:
        """Do one piece of work of the client whose turn it is."""
        with self._lock:
            name, works = self._waiting.popitem(last=False)
            future, work = works.popleft()
            if works:
                self._waiting[name] = works  # behind all others
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            future.set_exception(error)
        finally:
            del future, work
