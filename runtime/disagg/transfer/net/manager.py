"""SocketManager: connections, transfers and streams. A transfer over sockets defines how to listen and
connect. PullingManager: a SocketManager whose decode side fetches KV itself, in one thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from runtime.disagg.transfer.bootstrap import REQUEST_S, EngineInfo, RankInfo, register, resolve
from runtime.disagg.transfer.kv_manager import KVManager, TransferOptions
from runtime.disagg.transfer.memory import KVMapping, KVMemory, cut, size_of, tokens_of
from runtime.disagg.transfer.metadata import MetadataBuffers
from runtime.disagg.transfer.net.handshake import greet, receive_hello, refuse, welcome
from runtime.disagg.transfer.net.link import Link
from runtime.disagg.transfer.net.messages import Chunk, Hello, Welcome
from runtime.disagg.transfer.net.receiving import Receiver, ReceivingSide
from runtime.disagg.transfer.net.sending import Sender, SendingSide
from runtime.disagg.transfer.net.streams import MAX_PIECE, Arrived, Piece, PieceReceiver, PieceSender
from runtime.plan import Run
from runtime.protocol.errors import (
    EngineDead,
    RuntimeFault,
    TransferError,
    TransferPeerLost,
)

log = logging.getLogger(__name__)

BACKLOG = 128
HELLO_S = 10.0
GREETINGS = 64
"""Handshakes at once, at most; more connections are closed."""
PART_PIECES = 4
"""How many pieces' bytes are fetched at once."""
CLOSE_S = 5.0


class SocketManager(KVManager):
    """Both sides of transfers over sockets."""

    carries: ClassVar[bool] = True
    name: ClassVar[str]

    def __init__(
        self, memory: KVMemory, rows: MetadataBuffers, options: TransferOptions | None = None
    ) -> None:
        self.memory, self.rows = memory, rows
        self.options = (options or TransferOptions()).verify()
        self.sending = SendingSide(memory, rows, self.options, self._push)
        self.receiving = ReceivingSide(memory, rows, self.options, self._connect)
        self._lock = threading.Lock()
        self._closed = False
        self._links: dict[str, Link] = {}
        self._streams: dict[str, PieceSender] = {}
        self._listener: socket.socket | None = None
        self._greetings = threading.Semaphore(GREETINGS)
        self._sent = self._received = 0  # bytes; of links that are there, their streams count

    # -- how a transfer reaches the other side ---------------------------------------------------------------

    @abstractmethod
    def open(self) -> tuple[socket.socket, str]:
        """Listen; returns the socket, and the address for peers."""

    @abstractmethod
    def dial(self, address: str) -> socket.socket:
        """Connect to an address that open() returned on the other side. Raises OSError, TransferError."""

    def mapping(self) -> KVMapping | None:
        """For a decode side that fetches KV; None: KV is pushed to it."""
        return None

    def extra(self) -> bytes:
        """More data for the other side's handshake."""
        return b""

    def met(self, link: Link, end: socket.socket, answer: Hello | Welcome) -> None:
        """A hello is over, before the first message: on the prefill side (Hello), or the decode side
        (Welcome). Raises TransferError, OSError."""

    def fetch(self, link: Link, chunk: Chunk, receiver: Receiver) -> None:
        """Begin to fetch these tokens (to Receiver.write_tokens); must not block."""
        raise TransferError("KV to be fetched came unasked", where=link.peer)

    # -- KVManager -------------------------------------------------------------------------------------------

    def listen(self, bootstrap: str | None = None) -> str:
        self._listener, address = self.open()
        threading.Thread(target=self._accept, args=(self._listener,), name="transfer", daemon=True).start()
        if bootstrap is not None:
            info = RankInfo(
                address=address,
                transfer=self.name,
                layout=self.memory.layout,
                row_bytes=self.rows.row_bytes,
                rank=self.options.rank,
                ranks=self.options.ranks,
            )
            register(bootstrap, info, self.options.key, REQUEST_S)
        return address

    def sender(self, bootstrap_id: int) -> Sender:
        self._check_open()
        return self.sending.sender(bootstrap_id)

    def receiver(self, bootstrap: str, bootstrap_id: int) -> Receiver:
        self._check_open()
        return self.receiving.receiver(bootstrap, bootstrap_id)

    def state(self) -> dict[str, Any]:
        with self._lock:
            sent = self._sent + sum(one.bytes for one in self._streams.values())
            links = len(self._links)
        return {
            "transfer": self.name,
            "links": links,
            "sending": self.sending.live,
            "receiving": self.receiving.live,
            "bytes_sent": sent,
            "bytes_received": self._received,
            **self.sending.counts,
            **self.receiving.counts,
        }

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            links = list(self._links.values())
        fault = EngineDead("this engine is ending", where="transfer")
        self.sending.close(fault)
        self.receiving.close(fault)
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept()
            self._listener.close()
        for link in links:
            link.close()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("this engine is ending", where="transfer")

    # -- the prefill side's connections ----------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                end, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                log.warning("a connection could not be taken: %s", error)
                time.sleep(0.1)  # no files left, perhaps; they come back
                continue
            if not self._greetings.acquire(blocking=False):
                end.close()
                continue
            threading.Thread(target=self._welcome, args=(end,), name="transfer hello", daemon=True).start()

    def _welcome(self, end: socket.socket) -> None:
        try:
            hello, proof = receive_hello(end, self.options.key, HELLO_S)
            try:
                self._check_hello(hello)
            except RuntimeFault as fault:
                refuse(end, fault)
                raise
            if hello.kind == "stream":
                self._add_stream(end, hello, proof)
            else:
                self._add_link(end, hello, proof)
        except (RuntimeFault, OSError) as error:
            log.warning("a connection was refused: %s", error)
            end.close()
        finally:
            self._greetings.release()

    def _check_hello(self, hello: Hello) -> None:
        if hello.transfer != self.name:
            raise TransferError(
                f"the decode side has transfer {hello.transfer!r}, the prefill side {self.name!r}",
                where="hello",
                hint="start both sides with the same --disaggregation-transfer-backend",
            )
        hello.layout.check(self.memory.layout)
        if hello.kind == "messages" and hello.row_bytes != self.rows.row_bytes:
            raise TransferError(
                f"metadata rows have {hello.row_bytes} bytes on the decode side,"
                f" {self.rows.row_bytes} on the prefill side",
                where="hello",
                hint="start both sides with the same settings",
            )
        if hello.kind == "stream" and hello.session not in self._streams:
            raise TransferPeerLost("the connection that this stream belongs to has ended", where="hello")

    def _add_stream(self, end: socket.socket, hello: Hello, proof: bytes) -> None:
        answer = Welcome(proof=proof, layout=self.memory.layout, session=hello.session)
        welcome(end, answer, HELLO_S)
        self._streams[hello.session].add(end)

    def _add_link(self, end: socket.socket, hello: Hello, proof: bytes) -> None:
        session = secrets.token_hex(16)
        mapping = self.mapping()
        answer = Welcome(
            proof=proof,
            layout=self.memory.layout,
            session=session,
            mapping=mapping,
            heartbeat=self.options.heartbeat,
            extra=self.extra(),
        )
        peer = f"decode rank {hello.rank} of {hello.ranks}"
        link = self._link(end, peer, session, hello, pulls=mapping is not None)
        if not link.pulls:
            streams = PieceSender(self.options.faults, link.break_off)
            link.on_close(streams.close)
            with self._lock:
                self._streams[session] = streams
        try:
            welcome(end, answer, HELLO_S)
            self.met(link, end, hello)
        except BaseException:
            link.close()
            raise
        self._begin(link, self.sending.take)

    def _push(self, link: Link, piece: Piece) -> None:
        streams = self._streams.get(link.session)
        if streams is not None:
            streams.put(piece)

    # -- the decode side's connections -----------------------------------------------------------------------

    def _connect(self, bootstrap: str) -> list[Link]:
        engine = resolve(bootstrap, self.options.key, REQUEST_S)
        self._check_engine(engine, bootstrap)
        links: list[Link] = []
        try:
            for info in engine.ranks:
                link = self._connect_rank(info)
                links.append(link)
        except BaseException:
            for link in links:
                link.close()
            raise
        return links

    def _check_engine(self, engine: EngineInfo, bootstrap: str) -> None:
        if engine.transfer != self.name:
            raise TransferError(
                f"the prefill side has transfer {engine.transfer!r}, this side {self.name!r}",
                where=bootstrap,
                hint="start both sides with the same --disaggregation-transfer-backend",
            )
        if engine.dp_size * engine.pp_size > 1:
            raise TransferError(
                "a prefill side with several dp or pp ranks is not supported", where=bootstrap
            )
        for info in engine.ranks:
            self.memory.layout.check(info.layout)

    def _connect_rank(self, info: RankInfo) -> Link:
        end = self._dial(info.address)
        try:
            answer = greet(end, self._hello("messages", ""), self.options.key, HELLO_S)
            self.memory.layout.check(answer.layout)
            link = self._link(
                end, f"prefill rank {info.rank} of {info.ranks}", answer.session, answer,
                pulls=answer.mapping is not None,
            )  # fmt: skip
            self.met(link, end, answer)
        except BaseException:
            end.close()
            raise
        self._begin(link, self._take_sent)
        if not link.pulls:
            try:
                for _ in range(self.options.streams):
                    self._open_stream(link, info)
            except BaseException:
                link.close()
                raise
        return link

    def _open_stream(self, link: Link, info: RankInfo) -> None:
        end = self._dial(info.address)
        try:
            greet(end, self._hello("stream", link.session), self.options.key, HELLO_S)
        except BaseException:
            end.close()
            raise

        def take(arrived: Arrived) -> None:
            self._received += arrived.data.nbytes
            receiver = self.receiving.find(arrived.bootstrap_id)
            if receiver is not None:
                receiver.piece(link, arrived)

        most = max(MAX_PIECE, self.memory.layout.token_bytes(self.memory.layout.heads))
        stream = PieceReceiver(end, take, link.break_off, most)
        link.on_close(stream.close)

    def _take_sent(self, link: Link, message: Any) -> None:
        if isinstance(message, Chunk) and link.pulls:
            receiver = self.receiving.find(message.bootstrap_id)
            if receiver is not None:
                self._received += size_of(self.memory.layout, message.runs, receiver.heads(link))
                self.fetch(link, message, receiver)
        else:
            self.receiving.take(link, message)

    def _dial(self, address: str) -> socket.socket:
        try:
            return self.dial(address)
        except OSError as error:
            cause = "no answer in time" if isinstance(error, TimeoutError) else error.strerror or str(error)
            raise TransferPeerLost(f"the prefill side was not reached: {cause}", where=address) from error

    def _hello(self, kind: Any, session: str) -> Hello:
        return Hello(
            nonce=b"",
            proof=b"",
            transfer=self.name,
            layout=self.memory.layout,
            kind=kind,
            session=session,
            rank=self.options.rank,
            ranks=self.options.ranks,
            row_bytes=self.rows.row_bytes,
            heartbeat=self.options.heartbeat,
            extra=self.extra(),
        )

    # -- both ------------------------------------------------------------------------------------------------

    def _link(
        self, end: socket.socket, peer: str, session: str, hello: Hello | Welcome, *, pulls: bool
    ) -> Link:
        options = self.options
        link = Link(
            end,
            peer,
            session,
            hello.layout,
            heartbeat=options.heartbeat,
            misses=options.heartbeat_misses,
            peer_heartbeat=hello.heartbeat,
            pulls=pulls,
        )
        link.on_close(lambda: self._forget(link))
        return link

    def _begin(self, link: Link, take: Any) -> None:
        with self._lock:
            self._links[link.session] = link
            closed = self._closed
        link.start(take, self._lost)
        if closed:
            link.close()

    def _forget(self, link: Link) -> None:
        with self._lock:
            self._links.pop(link.session, None)
            streams = self._streams.pop(link.session, None)
            if streams is not None:
                self._sent += streams.bytes

    def _lost(self, link: Link, fault: RuntimeFault) -> None:
        level = logging.WARNING if self.sending.live or self.receiving.live else logging.INFO
        log.log(level, "%s", str(fault))  # a record that is kept must not keep frames, and the pool in them
        self.sending.lost(link, fault)
        self.receiving.lost(link, fault)


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
        `first` on (Receiver.write_tokens). False: the transfer has ended. Raises TransferError."""

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
                log.exception("KV of room %d could not be fetched", receiver.bootstrap_id)
                receiver.fail(TransferError(f"KV could not be fetched: {error}", where=link.peer))

    def _fetch(self, link: Link, chunk: Chunk, receiver: Receiver) -> None:
        heads = receiver.heads(link)
        # In parts, so that an abort of the transfer need not wait long.
        size = max(1, self.part_bytes // self.memory.layout.token_bytes(max(1, len(heads))))
        count = tokens_of(chunk.runs)
        for at in range(0, count, size):
            if receiver.progress.ended:
                return
            part = cut(chunk.runs, at, min(size, count - at))
            if not self.bring(link, part, heads, receiver, chunk.first + at):
                return
