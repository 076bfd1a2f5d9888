"""Mailboxes between processes of one machine: ZMQ PUSH/PULL over a Unix socket in a private folder.

Many senders, one receiver, nothing ever waits for ever: a sender gives up after its deadline, a full queue is
an error, closing lingers only so long. It knows bytes and sockets; what the structs mean is not its business.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from runtime.ipc.mailbox import MailboxClosed
from runtime.ipc.wire import MAX_BYTES, decode, encode
from runtime.protocol.errors import InternalFault, WireError

log = logging.getLogger(__name__)

QUEUE_MESSAGES = 20_000
"""Messages that may wait on each side of one connection."""
SEND_TIMEOUT_S = 5.0
LINGER_S = 1.0
RECONNECT_MS = 20


def make_folder(folder: Path) -> Path:
    """Create a folder that only this user can enter, or check that an existing one is such. Raises
    InternalFault."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise InternalFault(f"cannot be made: {error.strerror or error}", where=str(folder)) from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise InternalFault(
            "other users can enter this folder; sockets in it would not be private",
            where=str(folder),
            hint=f"chmod 700 {folder}",
        )
    return folder


def address_of(path: Path) -> str:
    """The ZMQ address of a socket's path. Raises InternalFault when the path is too long for the system."""
    size, limit = len(os.fsencode(path)), zmq.IPC_PATH_MAX_LEN
    if size > limit:
        raise InternalFault(
            f"the socket's path has {size} bytes, the system allows {limit}",
            where=str(path),
            hint="set TMPDIR to a folder with a shorter path",
        )
    return f"ipc://{path}"


class ZmqOutbox:
    """The sending end; the receiver may come later or earlier. Safe to use from any thread."""

    def __init__(
        self,
        path: Path,
        *,
        timeout_s: float = SEND_TIMEOUT_S,
        linger_s: float = LINGER_S,
        queue: int = QUEUE_MESSAGES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        """timeout_s: how long `send` may wait for room. queue: messages that may wait here. linger_s: how
        long `close` may wait until what was sent is out."""
        address = address_of(path)
        self._path, self._timeout_s, self._max_bytes = path, timeout_s, max_bytes
        self._lock = threading.Lock()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, queue)
        self._socket.setsockopt(zmq.LINGER, int(linger_s * 1000))
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        _open(self._socket.connect, address, self)

    def send(self, item: msgspec.Struct) -> None:
        """Raises WireError for what cannot travel (nothing was sent), MailboxClosed after `close` or when the
        other side took nothing for timeout_s."""
        data = encode(item, self._max_bytes)
        deadline = time.monotonic() + self._timeout_s
        if not self._lock.acquire(timeout=max(0.0, self._timeout_s)):
            raise self._stuck()
        try:
            while True:
                if self._socket.closed:
                    raise MailboxClosed
                try:
                    self._socket.send(data, zmq.NOBLOCK, copy=len(data) < 65536)
                except zmq.Again:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise self._stuck() from None
                    self._socket.poll(max(1, int(left * 1000)), zmq.POLLOUT)
                else:
                    return
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._socket.close()
            self._context.term()

    def _stuck(self) -> MailboxClosed:
        return MailboxClosed(f"{self._path.stem} took no message for {self._timeout_s:g} s")


class ZmqInbox:
    """The receiving end, which makes the socket. One thread receives; any thread may close."""

    def __init__(self, path: Path, *, queue: int = QUEUE_MESSAGES, max_bytes: int = MAX_BYTES) -> None:
        """Raises InternalFault: the path is too long, its folder is open to others, or the socket cannot be
        made."""
        make_folder(path.parent)
        address = address_of(path)
        self.malformed = 0
        self._path, self._queue, self._max_bytes = path, queue, max_bytes
        self._lock, self._wakes = threading.Lock(), threading.Lock()  # the second: of the pipe
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, queue)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        _open(self._socket.bind, address, self)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_read, zmq.POLLIN)

    def receive(self, timeout: float | None) -> list[Any]:
        """As Inbox says. A message that is none of ours is logged, counted in `malformed` and dropped."""
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
        """What has arrived can still be received; the receiver that then finds nothing releases the socket.
        When nothing has arrived and nobody receives, it is released here."""
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
        for _ in range(self._queue):
            try:
                frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            try:
                items.append(decode(frame.buffer, self._max_bytes))
            except WireError as error:
                self.malformed += 1
                log.error("%s: dropped a malformed message: %s", self._path.stem, error)
        return items

    def _release(self) -> None:
        self._socket.close()
        self._context.term()
        with self._wakes:
            os.close(self._wake_read)
            os.close(self._wake_write)
        with contextlib.suppress(OSError):
            self._path.unlink()


def _open(how: Any, address: str, owner: ZmqOutbox | ZmqInbox) -> None:
    try:
        how(address)
    except zmq.ZMQError as error:
        owner.close()
        raise InternalFault(f"the socket cannot be opened: {error}", where=address) from error
