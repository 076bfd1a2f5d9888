"""PullingManager: a SocketManager whose decode side fetches KV itself, in one thread, told where it lies."""

from __future__ import annotations

import logging
import queue
import threading
from abc import abstractmethod
from collections.abc import Sequence

from runtime.disagg.transfer.kv_manager import TransferOptions
from runtime.disagg.transfer.memory import KVMemory, cut, tokens_of
from runtime.disagg.transfer.metadata import MetadataBuffers
from runtime.disagg.transfer.net.link import Link
from runtime.disagg.transfer.net.manager import SocketManager
from runtime.disagg.transfer.net.messages import Chunk
from runtime.disagg.transfer.net.receiving import Receiver
from runtime.plan import Run
from runtime.protocol.errors import TransferError

log = logging.getLogger(__name__)

PART_PIECES = 4
"""How many pieces' bytes are fetched at once."""
CLOSE_S = 5.0


class PullingManager(SocketManager):
    def __init__(
        self, memory: KVMemory, rows: MetadataBuffers, options: TransferOptions | None = None
    ) -> None:
        super().__init__(memory, rows, options)
        self._jobs: queue.SimpleQueue[tuple[Link, Chunk, Receiver] | None] = queue.SimpleQueue()
        self._fetcher: threading.Thread | None = None
        self.part_bytes = max(
            PART_PIECES * self.options.piece_bytes, memory.layout.token_bytes(memory.layout.heads)
        )

    @abstractmethod
    def bring(self, link: Link, there: Sequence[Run], heads: range, receiver: Receiver, first: int) -> bool:
        """The KV of these slots of the prefill side, at most part_bytes, to the receiver's tokens from
        `first` on (Receiver.place). False: the room has ended. Raises TransferError."""

    def fetch(self, link: Link, chunk: Chunk, receiver: Receiver) -> None:
        with self._lock:
            if self._fetcher is None:
                self._fetcher = threading.Thread(target=self._fetch_all, name="transfer fetch", daemon=True)
                self._fetcher.start()
        self._jobs.put((link, chunk, receiver))

    def close(self) -> None:
        super().close()
        self._jobs.put(None)
        if self._fetcher is not None and self._fetcher is not threading.current_thread():
            self._fetcher.join(CLOSE_S)  # its links have ended, and its reads with them

    def _fetch_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            link, chunk, receiver = job
            try:
                self._fetch(link, chunk, receiver)
            except TransferError as error:
                receiver.fail(error)
            except Exception as error:
                log.exception("KV of room %d could not be fetched", receiver.room)
                receiver.fail(TransferError(f"KV could not be fetched: {error}", where=link.peer))

    def _fetch(self, link: Link, chunk: Chunk, receiver: Receiver) -> None:
        heads = receiver.heads(link)
        # In parts, so that whoever aborts the room need not wait long.
        size = max(1, self.part_bytes // self.memory.layout.token_bytes(max(1, len(heads))))
        count = tokens_of(chunk.runs)
        for at in range(0, count, size):
            if receiver.progress.ended:
                return
            part = cut(chunk.runs, at, min(size, count - at))
            if not self.bring(link, part, heads, receiver, chunk.first + at):
                return
