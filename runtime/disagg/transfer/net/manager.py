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

from runtime.disagg.transfer.bootstrap import REQUEST_S, EngineInfo, register, resolve
from runtime.disagg.transfer.kv_manager import KVManager, TransferOptions
from runtime.disagg.transfer.memory import KVMapping, KVMemory, cut, size_of, tokens_of
from runtime.disagg.transfer.net.handshake import greet, receive_hello, refuse, welcome
from runtime.disagg.transfer.net.link import Link
from runtime.disagg.transfer.net.messages import Chunk, Hello, Welcome
from runtime.disagg.transfer.net.receiving import Receiver, ReceivingSide
from runtime.disagg.transfer.net.sending import Sender, SendingSide
from runtime.disagg.transfer.net.streams import MAX_PIECE, PIECE_BYTES, Arrived, PieceReceiver, PieceSender
from runtime.plan import Run
from runtime.protocol.errors import EngineDead, RuntimeFault, TransferError, TransferPeerLost

log = logging.getLogger(__name__)

BACKLOG = 128
HELLO_S = 10.0
GREETINGS = 64
"""Handshakes at once, at most; more connections are closed."""
PART_PIECES = 4
"""How many pieces' bytes are fetched at once."""
STREAMS = 2
"""Connections for the KV between two managers, if it is pushed."""
CLOSE_S = 5.0


class SocketManager(KVManager):
    """Both sides of transfers over sockets."""

    carries: ClassVar[bool] = True
    name: ClassVar[str]

    def __init__(self, memory: KVMemory, options: TransferOptions | None = None) -> None:
        self.memory = memory
        self.options = (options or TransferOptions()).verify()
        self.sending = SendingSide(memory, self.options)
        self.receiving = ReceivingSide(memory, self.options, self._connect)
        self._lock = threading.Lock()
        self._closed = False
        self._links: dict[str, Link] = {}
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
        receiver.fail(TransferError("KV to be fetched came unasked", where=link.peer))

    # -- KVManager -------------------------------------------------------------------------------------------

    def listen(self, bootstrap: str | None = None) -> str:
        self._listener, address = self.open()
        threading.Thread(target=self._accept, args=(self._listener,), name="transfer", daemon=True).start()
        if bootstrap is not None:
            register(bootstrap, EngineInfo(address, self.name), self.options.key, REQUEST_S)
        return address

    def sender(self, bootstrap_id: int) -> Sender:
        self._check_open()
        return self.sending.sender(bootstrap_id)

    def receiver(self, bootstrap: str, bootstrap_id: int) -> Receiver:
        self._check_open()
        return self.receiving.receiver(bootstrap, bootstrap_id)

    def state(self) -> dict[str, Any]:
        with self._lock:
            streams = [link.streams for link in self._links.values() if link.streams is not None]
            sent, links = self._sent + sum(one.bytes for one in streams), len(self._links)
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

    def _add_stream(self, end: socket.socket, hello: Hello, proof: bytes) -> None:
        link = self._links.get(hello.session)
        if link is None or link.streams is None:
            fault = TransferPeerLost("the connection that this stream belongs to has ended", where="hello")
            refuse(end, fault)
            raise fault
        welcome(end, Welcome(proof=proof, layout=self.memory.layout, session=hello.session), HELLO_S)
        link.streams.add(end)

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
        link = self._link(end, "the decode engine", session, hello, pulls=mapping is not None)
        if not link.pulls:
            link.streams = PieceSender(self.options.faults, link.break_off)
            link.on_close(link.streams.close)
        self._keep(link)  # its streams may come as soon as it is welcome
        try:
            welcome(end, answer, HELLO_S)
            self.met(link, end, hello)
        except BaseException:
            link.close()
            raise
        self._begin(link, self.sending.take)

    # -- the decode side's connections -----------------------------------------------------------------------

    def _connect(self, bootstrap: str) -> Link:
        engine = resolve(bootstrap, self.options.key, REQUEST_S)
        if engine.transfer != self.name:
            raise TransferError(
                f"the prefill side has transfer {engine.transfer!r}, this side {self.name!r}",
                where=bootstrap,
                hint="start both sides with the same --disaggregation-transfer-backend",
            )
        end = self._dial(engine.address)
        try:
            answer = greet(end, self._hello("messages", ""), self.options.key, HELLO_S)
            self.memory.layout.check(answer.layout)
            pulls = answer.mapping is not None
            link = self._link(end, "the prefill engine", answer.session, answer, pulls=pulls)
            self.met(link, end, answer)
        except BaseException:
            end.close()
            raise
        self._begin(link, self._take_sent)
        try:
            for _ in range(0 if link.pulls else STREAMS):
                self._open_stream(link, engine.address)
        except BaseException:
            link.close()
            raise
        return link

    def _open_stream(self, link: Link, address: str) -> None:
        end = self._dial(address)
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
        if not isinstance(message, Chunk):
            self.receiving.take(link, message)
        elif (receiver := self.receiving.find(message.bootstrap_id)) is not None:
            self.fetch(link, message, receiver)

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
            heartbeat=self.options.heartbeat,
            extra=self.extra(),
        )

    # -- both ------------------------------------------------------------------------------------------------

    def _link(
        self, end: socket.socket, peer: str, session: str, hello: Hello | Welcome, *, pulls: bool
    ) -> Link:
        silence = self.options.heartbeat * self.options.heartbeat_misses
        ping = min(self.options.heartbeat, hello.heartbeat) / 2
        link = Link(end, peer, session, silence=silence, ping=ping, pulls=pulls)
        link.on_close(lambda: self._forget(link))
        return link

    def _keep(self, link: Link) -> None:
        with self._lock:
            if not link.closed:
                self._links[link.session] = link

    def _begin(self, link: Link, take: Any) -> None:
        self._keep(link)
        link.start(take, self._lost)
        if self._closed:
            link.close()

    def _forget(self, link: Link) -> None:
        with self._lock:
            if self._links.pop(link.session, None) is not None and link.streams is not None:
                self._sent += link.streams.bytes

    def _lost(self, link: Link, fault: RuntimeFault) -> None:
        level = logging.WARNING if self.sending.live or self.receiving.live else logging.INFO
        log.log(level, "%s", str(fault))  # a record that is kept must not keep frames, and the pool in them
        self.sending.lost(link, fault)
        self.receiving.lost(link, fault)


class PullingManager(SocketManager):
    def __init__(self, memory: KVMemory, options: TransferOptions | None = None) -> None:
        super().__init__(memory, options)
        self._jobs: queue.SimpleQueue[tuple[Link, Chunk, Receiver] | None] = queue.SimpleQueue()
        self._fetcher: threading.Thread | None = None
        self.part_bytes = max(PART_PIECES * PIECE_BYTES, memory.layout.token_bytes(memory.layout.heads))

    @abstractmethod
    def bring(self, link: Link, there: Sequence[Run], receiver: Receiver, first: int) -> bool:
        """The KV of these slots of the prefill side, at most part_bytes, to the receiver's tokens from
        `first` on (Receiver.write_tokens). False: the transfer has ended. Raises TransferError."""

    def fetch(self, link: Link, chunk: Chunk, receiver: Receiver) -> None:
        if not link.pulls:
            return super().fetch(link, chunk, receiver)
        self._received += size_of(self.memory.layout, chunk.runs, self.memory.layout.span)
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
        # In parts, so that an abort of the transfer need not wait long.
        size = self.part_bytes // self.memory.layout.token_bytes(self.memory.layout.heads)
        count = tokens_of(chunk.runs)
        for at in range(0, count, size):
            if receiver.progress.ended:
                return
            part = cut(chunk.runs, at, min(size, count - at))
            if not self.bring(link, part, receiver, chunk.first + at):
                return
