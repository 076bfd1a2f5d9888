"""Mailboxes between two processes over a pair of connected Unix sockets, one in each direction.

There is no thread between the caller and the socket (a message and its answer take 15 us, with ZMQ 80 us),
and the end of one side is the end of the other. An unreadable message is an error, it is not dropped.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from runtime.ipc.mailbox import LINGER_S, Inbox, MailboxClosed, MailboxFull, Outbox
from runtime.ipc.wire import Wire
from runtime.protocol.errors import WireError

READ_BYTES = 1 << 16
HEAD = struct.Struct(">I")


def frame(data: bytes) -> bytes:
    return HEAD.pack(len(data)) + data


class Frames:
    """Splits a byte stream into messages. Each is preceded by its length, four bytes, big-endian."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are now complete. Raises WireError for one that is longer than max_bytes."""
        buffer = self._buffer
        if not buffer and len(data) >= HEAD.size:
            (size,) = HEAD.unpack_from(data)
            if HEAD.size + size == len(data) and size <= self._max_bytes:
                yield data[HEAD.size :]  # the common case: exactly one message
                return
        buffer += data
        while len(buffer) >= HEAD.size:
            (size,) = HEAD.unpack_from(buffer)
            if size > self._max_bytes:
                raise WireError(
                    f"a message of {size} bytes; at most {self._max_bytes} are taken", where="message"
                )
            end = HEAD.size + size
            if len(buffer) < end:
                return
            message = bytes(memoryview(buffer)[HEAD.size : end])
            del buffer[:end]
            yield message


class SocketOutbox(Outbox):
    """It owns the socket, but nothing else that shares the connection."""

    def __init__(self, end: socket.socket, wire: Wire, timeout_s: float) -> None:
        self._end, self._wire, self._timeout_s = end, wire, timeout_s
        self._lock = threading.Lock()
        end.setblocking(False)
        self._poll = select.poll()
        self._poll.register(end, select.POLLOUT)

    def send(self, item: msgspec.Struct) -> None:
        """Raises WireError for an item that cannot be encoded (nothing was sent), MailboxClosed if either
        side is closed, and MailboxFull if the other side did not read for timeout_s. A partial send closes
        the mailbox: the rest would be read as the next message."""
        left = memoryview(frame(self._wire.encode(item)))
        size, deadline = len(left), time.monotonic() + self._timeout_s
        if not self._lock.acquire(timeout=max(0.0, self._timeout_s)):
            raise self._full()
        try:
            while True:
                try:
                    left = left[self._end.send(left) :]
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise MailboxClosed from error
                if not left:
                    return
                if not self._poll.poll(_milliseconds(deadline - time.monotonic())):
                    if len(left) < size:
                        self._end.close()
                    raise self._full()
        finally:
            self._lock.release()

    def close(self) -> None:
        """The other side still receives the sent messages."""
        _shut(self._end, socket.SHUT_WR)  # wakes a waiting sender
        with self._lock:
            self._end.close()

    def _full(self) -> MailboxFull:
        return MailboxFull(f"the other side took no message for {self._timeout_s:g} s")


class SocketInbox(Inbox):
    """The receiving end of a socket pair."""

    def __init__(self, end: socket.socket, wire: Wire) -> None:
        self.url, self._end, self._wire = f"fd:{end.fileno()}", end, wire
        self._frames = Frames(wire.max_bytes)
        self._whole: deque[bytes] = deque()
        self._lock = threading.Lock()
        self._ended = False  # nothing more will be read
        self._fault: WireError | None = None  # the reason
        end.setblocking(False)
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)

    def fileno(self) -> int:
        return self._end.fileno()

    def receive(self, timeout: float | None) -> list[Any]:
        """Raises WireError for an unreadable message, after all messages before it were received."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                if self._whole:
                    return self._decoded()
                if self._ended:
                    self._end.close()
                    raise self._fault or MailboxClosed
                left = None if deadline is None else _milliseconds(deadline - time.monotonic())
                if not self._poll.poll(left):
                    return []
                self._read()

    def close(self) -> None:
        _shut(self._end, socket.SHUT_RD)  # wakes the receiver; nothing more can come
        if self._lock.acquire(timeout=LINGER_S):
            try:
                while not self._ended:
                    self._read()
                self._end.close()
            finally:
                self._lock.release()

    def _read(self) -> None:
        try:
            data = self._end.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._ended = not data
        try:
            self._whole.extend(self._frames.feed(data))
        except WireError as error:
            self._ended, self._fault = True, error

    def _decoded(self) -> list[Any]:
        items: list[Any] = []
        while self._whole:
            try:
                items.append(self._wire.decode(self._whole[0]))
            except WireError:
                if items:
                    break
                self._whole.popleft()
                raise
            self._whole.popleft()
        return items


def _milliseconds(seconds: float) -> int:
    return max(0, math.ceil(seconds * 1000))


def _shut(end: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(how)
