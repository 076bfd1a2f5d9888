"""Mailbox: a one-way queue of structs between two parts of the pipeline; the in-memory kind.

The other kinds keep the same two verbs; address.py makes the ends of all. It knows nothing of what the
structs mean.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import Any, Protocol

import msgspec

SEND_TIMEOUT_S = 5.0
LINGER_S = 1.0


class MailboxClosed(Exception):
    """The other side is gone, or takes nothing; nothing more will come."""


class MailboxFull(MailboxClosed):
    """The other side took nothing for as long as a sender may wait."""


class Outbox(Protocol):
    """The end that any number of threads may put things into."""

    def send(self, item: msgspec.Struct) -> None:
        """Never blocks for long; raises MailboxClosed when the other side is gone, and WireError for what
        cannot travel."""
        ...

    def close(self) -> None: ...


class Inbox(Protocol):
    """The end that one thread takes things out of. Any thread may close it, and so wakes that one. url: its
    address; over TCP with the port that it has."""

    url: str

    def receive(self, timeout: float | None) -> list[Any]:
        """All waiting items; when there is none, wait up to `timeout` seconds (0: not at all) for the first
        and return [] if none came. Raises MailboxClosed when closed and empty."""
        ...

    def close(self) -> None: ...


class Mailbox(Outbox, Inbox, Protocol):
    """Both ends in one."""


class MemoryMailbox:
    """Between threads of one process. Any number of senders, one receiver."""

    # Not a queue.SimpleQueue: where a signal wakes its get() and the time is over by then, it waits for ever
    # (seen in CPython 3.11: what is left is negative then, which means no limit).

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
            closed = self._closed  # before it looks: what was sent before closing still arrives
            found = self._taken()
            if found:
                return found
            if closed:
                raise MailboxClosed
            if timeout == 0:
                return []
            left = -1.0 if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._wakeup.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
                return self._taken()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _taken(self) -> list[Any]:
        """All there is, in order."""
        items = self._items
        return [items.popleft() for _ in range(len(items))]

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # released already
            self._wakeup.release()
