"""Mailboxes between processes: ZMQ PUSH/PULL over a Unix socket in a private folder.

Many senders, one receiver. A sender has a deadline, closing lingers for a limited time.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from runtime.ipc.mailbox import LINGER_S, SEND_TIMEOUT_S, Inbox, MailboxClosed, MailboxFull, Outbox
from runtime.ipc.wire import PIPELINE, Wire
from runtime.protocol.errors import InternalFault, WireError

log = logging.getLogger(__name__)

QUEUE_MESSAGES = 20_000
"""Maximum number of queued messages on each side of one connection."""
RECONNECT_MS = 20


def make_folder(folder: Path) -> Path:
    """Create a folder that only this user can enter, or check an existing one. Raises InternalFault."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise InternalFault(f"cannot be made: {error.strerror or error}", where=str(folder)) from error
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise InternalFault(
            "other users can enter this folder; sockets in it would not be private",
            where=str(folder),
            hint=f"chmod 700 {folder}",
        )
    return folder


class _End:
    """The common part of both ends: the socket, not opened yet. Raises InternalFault."""

    def __init__(self, kind: int, url: str, wire: Wire) -> None:
        self.url, self._wire = url, wire
        self._path = Path(url.removeprefix("ipc://"))
        make_folder(self._path.parent)
        self._name = self._path.stem
        self._lock = threading.Lock()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(kind)

    def _open(self, how: Callable[[str], object]) -> None:
        try:
            how(self.url)
        except zmq.ZMQError as error:
            self._socket.close()
            self._context.term()
            raise InternalFault(f"the socket cannot be opened: {error}", where=self.url) from error


class ZmqOutbox(_End, Outbox):
    """The sending end; the receiver may start later. Safe to use from any thread."""

    def __init__(
        self,
        url: str,
        wire: Wire = PIPELINE,
        *,
        timeout_s: float = SEND_TIMEOUT_S,
        linger_s: float = LINGER_S,
        queue: int = QUEUE_MESSAGES,
    ) -> None:
        """timeout_s: how long `send` waits if the queue is full. queue: messages that may wait here.
        linger_s: how long `close` waits until sent messages are out."""
        super().__init__(zmq.PUSH, url, wire)
        self._timeout_s = timeout_s
        self._socket.setsockopt(zmq.SNDHWM, queue)
        self._socket.setsockopt(zmq.LINGER, int(linger_s * 1000))
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._open(self._socket.connect)

    def send(self, item: msgspec.Struct) -> None:
        """Raises WireError for an item that cannot be encoded (nothing was sent), MailboxClosed after
        `close`, MailboxFull if the other side did not read for timeout_s."""
        data = self._wire.encode(item)
        deadline = time.monotonic() + self._timeout_s
        if not self._lock.acquire(timeout=max(0.0, self._timeout_s)):
            raise self._full()
        try:
            while True:
                if self._socket.closed:
                    raise MailboxClosed
                try:
                    self._socket.send(data, zmq.NOBLOCK, copy=len(data) < 65536)
                except zmq.Again:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise self._full() from None
                    self._socket.poll(max(1, int(left * 1000)), zmq.POLLOUT)
                else:
                    return
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._socket.close()
            self._context.term()

    def _full(self) -> MailboxFull:
        return MailboxFull(f"{self._name} took no message for {self._timeout_s:g} s")


class ZmqInbox(_End, Inbox):
    """The receiving end, which creates the socket. One thread receives; any thread may close."""

    def __init__(self, url: str, wire: Wire = PIPELINE) -> None:
        """Raises InternalFault if its folder is open to others, or the socket cannot be created."""
        super().__init__(zmq.PULL, url, wire)
        self.malformed = 0
        self._closing = False
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.max_bytes)
        self._open(self._socket.bind)
        self._wakes = threading.Lock()  # of the pipe
        self._wake_read, self._wake_write = os.pipe()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def receive(self, timeout: float | None) -> list[Any]:
        """As in Inbox. An invalid message is logged, counted in `malformed` and dropped."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                if self._socket.closed:
                    raise MailboxClosed
                items = self._waiting()
                if items:
                    return items
                if self._closing:
                    self._release()
                    raise MailboxClosed
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    return []
                self._poller.poll(None if left is None else max(1, int(left * 1000)))

    def close(self) -> None:
        """Messages that have arrived can still be received; the receiver that then finds none releases the
        socket. If none have arrived and no thread receives, it is released here."""
        with self._wakes:  # as soon as it is closing, a receiver may release the pipe
            if self._closing:
                return
            self._closing = True
            with contextlib.suppress(OSError):
                os.write(self._wake_write, b"x")
        if self._lock.acquire(timeout=LINGER_S):
            try:
                if not self._socket.closed and not self._socket.poll(0, zmq.POLLIN):
                    self._release()
            finally:
                self._lock.release()

    def _waiting(self) -> list[Any]:
        items: list[Any] = []
        for _ in range(QUEUE_MESSAGES):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                items.append(self._wire.decode(frame.buffer))
            except WireError as error:
                self.malformed += 1
                log.error("%s: dropped a malformed message: %s", self._name, error)
        return items

    def _release(self) -> None:
        self._socket.close()
        self._context.term()
        with self._wakes:
            os.close(self._wake_read)
            os.close(self._wake_write)
        self._path.unlink(missing_ok=True)
