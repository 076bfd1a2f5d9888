"""Messages in a byte stream: each is preceded by its length, four bytes, big-endian."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from runtime.protocol.errors import WireError

HEAD = struct.Struct(">I")


def frame(data: bytes) -> bytes:
    return HEAD.pack(len(data)) + data


class Frames:
    """Bytes in, whole messages out."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The messages that are now complete. Raises WireError, after those before it, for one that is longer
        than max_bytes."""
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
