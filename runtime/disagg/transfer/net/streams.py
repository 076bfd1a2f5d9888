"""Streams: KV in pieces over connections of their own, each piece with a checksum.

What is not sent yet waits as slots, not as bytes: a piece is read from the pool when a connection is free for
it. So a slow reader costs no memory here.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import struct
import threading
import zlib
from collections.abc import Callable
from typing import NamedTuple

from runtime.disagg.transfer.faults import Faults
from runtime.disagg.transfer.kv_manager import KVSender
from runtime.disagg.transfer.memory import KVMemory, Order, tokens_of
from runtime.disagg.transfer.net.handshake import receive_exactly
from runtime.plan import Run
from runtime.protocol.errors import RuntimeFault, TransferCorrupt, TransferError, TransferPeerLost

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
"""Bytes of KV sent in one piece, about."""
MAX_PIECE = 256 << 20
"""Bytes of a piece that are taken, where one token is not more."""
_HEAD = struct.Struct("<QIIIBI")  # transfer, first, tokens, bytes, order, checksum of the bytes
_CHECK = struct.Struct("<I")  # of the head
_ORDERS: tuple[Order, Order] = ("token", "head")


class Piece(NamedTuple):
    """Some tokens of a transfer, from the `first` on: read from the pool when a connection is free."""

    sender: KVSender
    memory: KVMemory
    first: int
    runs: list[Run]

    def read(self) -> memoryview | None:
        """None: the transfer has ended."""
        with self.sender.progress.lock:
            if self.sender.progress.ended:
                return None
            return self.memory.read(self.runs, self.memory.layout.span, self.memory.layout.order)


class Arrived(NamedTuple):
    """A piece, as it came. fault: it is not what was sent."""

    bootstrap_id: int
    first: int
    tokens: int
    order: Order
    data: memoryview
    fault: TransferCorrupt | None


class PieceSender:
    """The streams of one link, prefill side: whichever is free takes the next piece."""

    def __init__(self, faults: Faults | None, lost: Callable[[RuntimeFault], None]) -> None:
        self._faults, self._lost = faults, lost
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._ends: list[socket.socket] = []
        self._closed = False
        self.bytes = 0

    def add(self, end: socket.socket) -> None:
        """One more connection."""
        end.settimeout(None)
        self._ends.append(end)
        if self._closed:
            _shut(end)
        threading.Thread(target=self._run, args=(end,), name="transfer stream", daemon=True).start()

    def put(self, piece: Piece) -> None:
        self._pieces.put(piece)

    def close(self) -> None:
        self._closed = True
        for end in self._ends:
            _shut(end)
            self._pieces.put(None)

    def _run(self, end: socket.socket) -> None:
        with end:
            while not self._closed and (piece := self._pieces.get()) is not None:
                try:
                    self._send(end, piece)
                except OSError as error:
                    if not self._closed:
                        cause = f"a stream was lost: {error.strerror or error}"
                        self._lost(TransferPeerLost(cause, where="transfer stream"))
                    return

    def _send(self, end: socket.socket, piece: Piece) -> None:
        try:
            data = piece.read()
        except TransferError as error:
            return piece.sender.fail(error)
        except Exception as error:
            bootstrap_id = piece.sender.bootstrap_id
            log.exception("KV of room %d cannot be read", bootstrap_id)
            piece.sender.fail(TransferError(f"KV cannot be read: {error}", where=f"room {bootstrap_id}"))
            return None
        if data is None:
            return None
        order, tokens = _ORDERS.index(piece.memory.layout.order), tokens_of(piece.runs)
        bootstrap_id, checksum = piece.sender.bootstrap_id, zlib.crc32(data)
        head = _HEAD.pack(bootstrap_id, piece.first, tokens, data.nbytes, order, checksum)
        if self._faults is not None:
            data = self._faults.on_piece(data)
        end.sendall(head + _CHECK.pack(zlib.crc32(head)))
        end.sendall(data)
        self.bytes += data.nbytes


class PieceReceiver:
    """One stream, decode side."""

    def __init__(
        self,
        end: socket.socket,
        take: Callable[[Arrived], None],
        lost: Callable[[RuntimeFault], None],
        max_bytes: int,
    ) -> None:
        self._end, self._take, self._lost, self._max_bytes = end, take, lost, max_bytes
        self._closed = False
        end.settimeout(None)
        threading.Thread(target=self._run, name="transfer stream", daemon=True).start()

    def close(self) -> None:
        self._closed = True
        _shut(self._end)

    def _run(self) -> None:
        head = bytearray(_HEAD.size + _CHECK.size)
        buffer = memoryview(bytearray(1 << 16))
        with self._end:
            try:
                while True:
                    receive_exactly(self._end, memoryview(head))
                    bootstrap_id, first, tokens, size, order, checksum = self._read_head(head)
                    if size > len(buffer):
                        buffer = memoryview(bytearray(size))
                    data = buffer[:size]
                    receive_exactly(self._end, data)
                    fault = None
                    if zlib.crc32(data) != checksum:
                        fault = TransferCorrupt(
                            "KV was damaged on its way: its checksum is another", where=f"room {bootstrap_id}"
                        )
                    self._take(Arrived(bootstrap_id, first, tokens, _ORDERS[order], data, fault))
            except TransferError as error:
                self._end_with(error)
            except OSError as error:
                self._end_with(
                    TransferPeerLost(f"a stream was lost: {error.strerror or error}", where="transfer stream")
                )
            except Exception as error:
                log.exception("a piece of KV could not be taken")
                self._end_with(TransferError(f"KV could not be taken: {error}", where="transfer stream"))
                raise

    def _read_head(self, head: bytearray) -> tuple[int, int, int, int, int, int]:
        (check,) = _CHECK.unpack_from(head, _HEAD.size)
        bootstrap_id, first, tokens, size, order, checksum = _HEAD.unpack_from(head)
        if zlib.crc32(memoryview(head)[: _HEAD.size]) != check or size > self._max_bytes or order > 1:
            raise TransferCorrupt("the head of a piece of KV is damaged", where="transfer stream")
        return bootstrap_id, first, tokens, size, order, checksum

    def _end_with(self, fault: RuntimeFault) -> None:
        if not self._closed:
            self._lost(fault)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
