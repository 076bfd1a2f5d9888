"""What takes long before a request can be sent (templates, tokenising) is done beside the event loop, in turn
for every client, and no more may wait for it than its bounds say."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from runtime.processes.frontend.client import CLIENT
from runtime.protocol.errors import BadRequest, QueueFull

T = TypeVar("T")

THREADS = 2
"""Texts that are encoded at once: the library lets go of the interpreter's lock meanwhile."""
MOST_CHARACTERS = 64 << 20
PER_ITEM = 64
"""An item of a request takes about as long as it takes to tokenise so many characters."""


class Shares:
    """Room of `most` in all, of which one client may hold half; what: of what, in errors; option: the name of
    the limit."""

    def __init__(self, most: int, what: str, option: str) -> None:
        self.most, self._what, self._option = most, what, option
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        self.held = 0

    def take(self, name: str, count: int) -> None:
        """Raises QueueFull: there is no room for it now; BadRequest: there never is."""
        share = self.most // 2
        with self._lock:
            own = self._held.get(name, 0)
            if own + count <= share and self.held + count <= self.most:
                self._held[name] = own + count
                self.held += count
                return
        if count > share:
            raise BadRequest(f"{count} {self._what} in one request; at most {share}", hint=self._option)
        whose = "of one client " if own + count > share else ""
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
    """`most`: characters that may wait, or be worked on, at once."""

    def __init__(self, most: int = MOST_CHARACTERS, threads: int = THREADS) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="sglang-dsl-encode")
        self._lock = threading.Lock()
        self._waiting: OrderedDict[str, deque[tuple[Future[Any], Callable[[], Any]]]] = OrderedDict()
        self.shares = Shares(most, "characters to be encoded", "max_encode_chars")

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises, done in the caller's context: for its client. size: its characters,
        roughly. Raises QueueFull, BadRequest."""
        context = copy_context()
        with self._taken(size) as name:
            future: Future[T] = Future()
            with self._lock:
                self._waiting.setdefault(name, deque()).append((future, partial(context.run, work)))
            self._pool.submit(self._next)
            return await asyncio.wrap_future(future)

    @contextmanager
    def _taken(self, size: int) -> Iterator[str]:
        name = CLIENT.get().name
        self.shares.take(name, size)
        try:
            yield name
        finally:
            self.shares.give_back(name, size)

    def _next(self) -> None:
        """One piece of work of the client whose turn it is; there is one for every call."""
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
