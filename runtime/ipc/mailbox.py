"""Mailbox: a one-way queue of structs between two parts of the pipeline; the in-memory kind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from runtime.protocol.errors import WireError

T = TypeVar("T")

SEND_TIMEOUT_S = 5.0
LINGER_S = 1.0


class MailboxClosed(Exception):
    """The other side is gone, or does not read; nothing more will arrive."""


class MailboxFull(MailboxClosed):
    """The other side did not read for the sender's timeout."""


class Outbox:
    """The sending end, for any number of threads."""

    def send(self, item: msgspec.Struct) -> None:
        """Raises MailboxClosed if the other side is gone, WireError for an item that cannot be encoded."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class Inbox:
    """The receiving end, for one thread. Any thread may close it, which wakes that one. url: its address."""

    url: str

    def receive(self, timeout: float | None) -> list[Any]:
        """All waiting items. If there are none, wait up to `timeout` seconds (0: not at all) for the first,
        and return [] if none arrived. Raises MailboxClosed if closed and empty."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def send_one_by_one(
    outbox: Outbox,
    items: Iterable[T],
    pack: Callable[[list[T]], msgspec.Struct],
    failed: Callable[[T, WireError], T],
) -> None:
    """Send each item in a message of its own; one that cannot be encoded is replaced by failed(item, why)."""
    for item in items:
        try:
            outbox.send(pack([item]))
        except WireError as error:
            outbox.send(pack([failed(item, error)]))


class MemoryMailbox(Outbox, Inbox):
    """Between threads of one process. Any number of senders, one receiver."""

    # Not a queue.SimpleQueue: if a signal wakes its get() after the timeout, it waits for ever (seen in
    # CPython 3.11: the remaining time is negative then, which means no limit).

    def __init__(self) -> None:
        self.url = "memory:"
        self._items: deque[Any] = deque()
        self._wakeup = threading.Lock()  # released by senders, acquired by the receiver
        self._wakeup.acquire()
        self._closed = False

    def send(self, item: msgspec.Struct) -> None:
        if self._closed:
            raise MailboxClosed
        self._items.append(item)
        self._wake()

    def receive(self, timeout: float | None) -> list[Any]:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            closed = self._closed  # read first: items sent before closing still arrive
            items = self._pop_all()
            if items:
                return items
            if closed:
                raise MailboxClosed
            if timeout == 0:
                return []
            left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._wakeup.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
                return self._pop_all()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _pop_all(self) -> list[Any]:
        items = self._items
        return [items.popleft() for _ in range(len(items))]

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # released already
            self._wakeup.release()
