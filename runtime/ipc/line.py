"""Line: messages between two processes over a pair of connected Unix sockets. Knows bytes and deadlines only.

One thread on each side, a few hundred bytes every millisecond: so there is no thread between the caller and
the socket (a message and its answer take 10 to 40 us), and the end of one side is the end of the line.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time

_HEAD = struct.Struct("<I")
MAX_BYTES = 1 << 30
READ_BYTES, MOST_AT_ONCE = 1 << 16, 1 << 20


class LineClosed(Exception):
    """The other side is gone, or this one was closed."""


class Line:
    """One end. What fails midway closes it: the rest of a message would be taken for the next one."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._buffer = bytearray()

    def fileno(self) -> int:
        """-1 when closed."""
        return self._end.fileno()

    def send(self, data: bytes, timeout: float | None) -> None:
        """Raises LineClosed, and TimeoutError when the other side takes nothing for so long (the line is
        closed then)."""
        if len(data) > MAX_BYTES:
            raise ValueError(f"a message of {len(data)} bytes; at most {MAX_BYTES} are sent")
        try:
            self._end.settimeout(timeout)
            self._end.sendall(_HEAD.pack(len(data)) + data)
        except TimeoutError:
            self.close()
            raise
        except OSError as error:
            raise LineClosed from error

    def receive(self, timeout: float | None) -> bytes:
        """The next message. Raises LineClosed, and TimeoutError when it is not whole by then (what has come
        of it stays for the next call)."""
        buffer, missing = self._buffer, _HEAD.size
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            if len(buffer) >= _HEAD.size:
                (size,) = _HEAD.unpack_from(buffer)
                if size > MAX_BYTES:
                    raise LineClosed(f"a message of {size} bytes")
                missing = _HEAD.size + size - len(buffer)
                if missing <= 0:
                    data = bytes(memoryview(buffer)[_HEAD.size : _HEAD.size + size])
                    del buffer[: _HEAD.size + size]
                    return data
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            try:
                self._end.settimeout(left)
                more = self._end.recv(min(max(READ_BYTES, missing), MOST_AT_ONCE))
            except TimeoutError:
                raise
            except OSError as error:
                raise LineClosed from error
            if not more:
                raise LineClosed
            buffer += more

    def close(self) -> None:
        """The other side's receive() ends, once it has read what was sent. Also where a fork of this process
        holds a copy of the socket."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


def make_line() -> tuple[Line, socket.socket]:
    """A line to be, and the end of it that the other process inherits."""
    mine, theirs = socket.socketpair()
    return Line(mine), theirs
