"""Metadata that is sent beside the KV: rows of fixed size, one per request."""

from __future__ import annotations

import struct
import threading
import zlib

import msgspec

from runtime.protocol.errors import BadRequest, TransferCorrupt, TransferError

ROW_BYTES = 16 << 10
_HEAD = struct.Struct("<QII")  # bootstrap id, size, checksum


class Metadata(msgspec.Struct, frozen=True, array_like=True):
    """Results of the prefill side, with which the decode side continues.

    output_ids     sampled there, without KV yet: the first token
    cached_tokens  of the prompt, in the prefill side's cache
    logprobs       one per output id, if requested
    top_logprobs   per output id its best (id, logprob) pairs
    token_ids      per output id the log-probabilities of the requested ids
    hidden         final hidden state of the last prompt token, if requested
    """

    output_ids: tuple[int, ...]
    cached_tokens: int = 0
    logprobs: tuple[float | None, ...] = ()
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    token_ids: tuple[tuple[float, ...], ...] = ()
    hidden: tuple[float, ...] = ()


_DECODER = msgspec.msgpack.Decoder(Metadata)
_ENCODER = msgspec.msgpack.Encoder()


class MetadataBuffers:
    """`rows` rows of `row_bytes` bytes: the transfer that wrote it, its size, its checksum, a Metadata. A row
    whose bootstrap id is 0 is empty. alloc() gives out empty rows. Any thread may call it."""

    def __init__(self, rows: int, row_bytes: int = ROW_BYTES) -> None:
        if rows < 1 or row_bytes < 64:
            raise BadRequest(
                f"{rows} metadata rows of {row_bytes} bytes; at least 1 of 64", where="metadata buffers"
            )
        self.rows, self.row_bytes = rows, row_bytes
        self._data = memoryview(bytearray(rows * row_bytes))
        self._lock = threading.Lock()
        self._free = list(range(rows))[::-1]

    def pack(self, bootstrap_id: int, metadata: Metadata) -> bytes:
        """A row's bytes. Raises TransferError when it does not fit."""
        body = _ENCODER.encode(metadata)
        if _HEAD.size + len(body) > self.row_bytes:
            raise TransferError(
                f"the request's metadata has {len(body)} bytes; a row holds {self.row_bytes - _HEAD.size}",
                where=f"room {bootstrap_id}",
                hint="ask for fewer log-probabilities, or give both sides larger metadata rows",
            )
        return _HEAD.pack(bootstrap_id, len(body), _checksum(bootstrap_id, body)) + body

    def land(self, index: int, row: bytes | bytearray | memoryview) -> None:
        """What pack() of the other side gave, into row `index`. Raises TransferError when it is too long."""
        if len(row) > self.row_bytes:
            raise TransferError(
                f"metadata of {len(row)} bytes for a row of {self.row_bytes}",
                where="metadata buffers",
                hint="give both sides rows of the same size",
            )
        at = index * self.row_bytes
        # The id last: until it is there the row is empty.
        self._data[at + 8 : at + len(row)] = row[8:]
        self._data[at : at + 8] = row[:8]

    def read(self, index: int, bootstrap_id: int) -> Metadata | None:
        """None: the row is empty. Raises TransferCorrupt: it is of another transfer, or damaged."""
        at, row_name = index * self.row_bytes, f"metadata row {index}, room {bootstrap_id}"
        owner, size, checksum = _HEAD.unpack_from(self._data, at)
        if owner == 0:
            return None
        if owner != bootstrap_id:
            raise TransferCorrupt(
                f"metadata of room {owner} in the row of room {bootstrap_id}", where=f"metadata row {index}"
            )
        body = bytes(self._data[at + _HEAD.size : at + min(_HEAD.size + size, self.row_bytes)])
        if len(body) != size or _checksum(bootstrap_id, body) != checksum:
            raise TransferCorrupt("the metadata are damaged", where=row_name)
        try:
            return _DECODER.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TransferCorrupt(f"not metadata: {error}", where=row_name) from error

    def clear(self, index: int) -> None:
        """Make it empty."""
        at = index * self.row_bytes
        self._data[at : at + _HEAD.size] = bytes(_HEAD.size)

    @property
    def free(self) -> int:
        return len(self._free)

    def alloc(self) -> int | None:
        """None: all are in use; try again later."""
        with self._lock:
            if not self._free:
                return None
            index = self._free.pop()
        self.clear(index)
        return index

    def release(self, index: int) -> None:
        """Raises ValueError for a row that is free."""
        with self._lock:
            if not 0 <= index < self.rows or index in self._free:
                raise ValueError(f"metadata row {index} was not in use")
            self._free.append(index)


def _checksum(bootstrap_id: int, body: bytes) -> int:
    return zlib.crc32(body, zlib.crc32(bootstrap_id.to_bytes(8, "little")))
