"""The decode side of transfers: where KV goes, which of it has arrived, and the prefill engines it comes
from."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runtime.disagg.transfer.kv_manager import (
    KVPoll,
    KVReceiver,
    TransferOptions,
)
from runtime.disagg.transfer.memory import KVMemory, check_slots, cut, share, tokens_of
from runtime.disagg.transfer.metadata import MetadataBuffers
from runtime.disagg.transfer.net.link import Link
from runtime.disagg.transfer.net.messages import Chunk, Done, Fail, Received, RowData, Want
from runtime.disagg.transfer.net.streams import Arrived
from runtime.plan import Run
from runtime.protocol.errors import (
    BadRequest,
    RuntimeFault,
    TransferCorrupt,
    TransferError,
    TransferPeerLost,
    from_dict,
)

log = logging.getLogger(__name__)

UNREACHED_S = 30.0
"""Seconds of attempts to connect to a prefill engine."""
AGAIN_S = (0.05, 1.0)
"""Between two attempts to reach a prefill engine: at first, and at most."""

Connect = Callable[[str], list[Link]]
"""Find the prefill engine of a bootstrap server and connect to all of its ranks; blocks. Raises
TransferPeerLost, if another attempt may succeed, and other TransferErrors."""


class Receiver(KVReceiver):
    """Created by ReceivingSide. Threads of links and streams deliver messages and pieces, one thread calls
    the rest."""

    def __init__(self, bootstrap_id: int, side: ReceivingSide, peer: Peer) -> None:
        super().__init__(bootstrap_id)
        self._side, self._peer = side, peer
        self._links: list[Link] = []
        self._shares: dict[Link, range] = {}
        self._runs: list[Run] = []
        self._index = -1
        self._missing: dict[Link, Any] = {}  # per link a bool per token: it has not arrived
        self._row = False
        self._unconfirmed: set[Link] = set()
        self._await_peer()

    def poll(self) -> KVPoll:
        if self.progress.now is KVPoll.Bootstrapping and not self._links:
            self._await_peer(again=True)
        return super().poll()

    def init(self, runs: Sequence[Run], start: int, index: int) -> None:
        with self.progress.lock:
            if self.progress.now is not KVPoll.WaitingForInput:
                return
            try:
                if runs:
                    check_slots(self._side.memory.layout, self._side.memory.slots, runs, self._side.span)
            except TransferError as error:
                self.fail(error)
                return
            self._runs, self._index = list(runs), index
            tokens = tokens_of(runs)
            self._missing = {link: np.ones(tokens, dtype=bool) for link in self._shares}
            self._unconfirmed = {link for link in self._shares if link.pulls}
            seconds = self._side.options.waiting_timeout
            self.progress.within(seconds, f"its KV did not arrive within {seconds:g} s")
            self.progress.advance(KVPoll.Transferring)
            for link in self._links:
                heads = self._shares.get(link, range(0))
                link.send(
                    Want(self.bootstrap_id, start, tokens, heads.start, len(heads), self._side.options.ranks)
                )

    # -- messages and pieces ---------------------------------------------------------------------------------

    def connected(self, links: list[Link]) -> None:
        with self.progress.lock:
            if self.progress.now is not KVPoll.Bootstrapping or self._links:
                return
            try:
                shares = share(self._side.span, [link.layout.span for link in links])
            except TransferError as error:
                self.fail(error)
                return
            self._links = links
            self._shares = {links[at]: heads for at, heads in shares}
            self.progress.within(None)
            self.progress.advance(KVPoll.WaitingForInput)

    def lost(self, link: Link, fault: RuntimeFault) -> None:
        if link in self._links:
            self.fail(fault, known_by=link)

    def piece(self, link: Link, arrived: Arrived) -> None:
        if arrived.fault is not None:
            self.fail(arrived.fault)
            return
        heads = self.heads(link)

        def write(runs: list[Run]) -> None:
            self._side.memory.write(runs, heads, arrived.order, arrived.data)

        self.write_tokens(link, arrived.first, arrived.tokens, write)

    def write_tokens(self, link: Link, first: int, tokens: int, write: Callable[[list[Run]], None]) -> bool:
        """Have `write` write these tokens into their slots, unless the transfer has ended; returns whether it
        did. A TransferError of `write` is the transfer's failure."""
        with self.progress.lock:
            if self.progress.now is not KVPoll.Transferring or link not in self._missing:
                return False
            missing = self._missing[link]
            if (
                first < 0
                or tokens < 1
                or first + tokens > len(missing)
                or not missing[first : first + tokens].all()
            ):
                self.fail(
                    TransferCorrupt(
                        f"tokens {first} to {first + tokens - 1} of {len(missing)} came unasked, or twice",
                        where=f"room {self.bootstrap_id}",
                    )
                )
                return False
            try:
                write(cut(self._runs, first, tokens))
            except TransferError as error:
                self.fail(error)
                return False
            missing[first : first + tokens] = False
            self._check_done()
            return True

    def heads(self, link: Link) -> range:
        """The heads that come from this link; maybe none."""
        return self._shares.get(link, range(0))

    def row(self, link: Link, row: bytes) -> None:
        with self.progress.lock:
            if self.progress.now is not KVPoll.Transferring or self._row or link not in self._missing:
                return
            try:
                self._side.rows.land(self._index, row)
                if self._side.rows.read(self._index, self.bootstrap_id) is None:
                    raise TransferCorrupt("metadata without a room", where=f"room {self.bootstrap_id}")
            except TransferError as error:
                self.fail(error)
                return
            self._row = True
            self._check_done()

    def done(self, link: Link) -> None:
        with self.progress.lock:
            self._unconfirmed.discard(link)
            self._check_done()

    # -- within ----------------------------------------------------------------------------------------------

    def _check_done(self) -> None:
        if self.progress.now is not KVPoll.Transferring or not self._row:
            return
        for link, missing in list(self._missing.items()):
            if not missing.any():
                del self._missing[link]
                link.send(Received(self.bootstrap_id))
        if not self._missing and not self._unconfirmed:
            self.progress.advance(KVPoll.Success)
            self._side.ended(self, None)

    def _await_peer(self, *, again: bool = False) -> None:
        seconds = self._side.options.bootstrap_timeout
        late = f"the prefill side was not reached within {seconds:g} s: {self._peer.trouble}"
        if again:
            self.progress.late(late)
        else:
            self.progress.within(seconds, late)

    def _notify_failed(self, known_by: Any = None) -> None:
        fault = self.progress.failure()
        assert fault is not None
        self._side.ended(self, fault)
        for link in self._links:
            if link is not known_by:
                link.send(Fail(self.bootstrap_id, fault.to_dict()))


class Peer:
    """A prefill engine, by its bootstrap server: connected to when a transfer needs it."""

    def __init__(self, bootstrap: str, connect: Connect) -> None:
        self.bootstrap = bootstrap
        self.trouble = "no attempt has ended yet"
        self._connect = connect
        self._lock = threading.Lock()
        self._links: list[Link] = []
        self._waiting: list[Receiver] = []
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def add(self, receiver: Receiver) -> None:
        with self._lock:
            lost = next((link for link in self._links if link.closed), None)
        if lost is not None:
            self.lost(lost)  # just now; its thread has not reported it yet
        with self._lock:
            links = self._links
            if not links:
                self._waiting.append(receiver)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name=f"transfer to {self.bootstrap}", daemon=True
                    )
                    self._thread.start()
        if links:
            self._connected([receiver], links)

    def lost(self, link: Link) -> None:
        """One of its ranks is lost: the next transfer connects to all of them anew."""
        with self._lock:
            if link not in self._links:
                return
            links, self._links = self._links, []
        for other in links:
            other.close()

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            links, self._links = self._links, []
        for link in links:
            link.close()

    def _run(self) -> None:
        pause, until = AGAIN_S[0], time.monotonic() + UNREACHED_S
        while True:
            with self._lock:
                self._waiting = [one for one in self._waiting if not one.progress.ended]
                if not self._waiting or self._closed.is_set():
                    self._thread = None
                    return
            try:
                links = self._connect(self.bootstrap)
            except Exception as error:
                if isinstance(error, TransferPeerLost) and time.monotonic() < until:
                    self.trouble = str(error)
                    self._closed.wait(pause)
                    pause = min(2 * pause, AGAIN_S[1])
                    continue
                if not isinstance(error, RuntimeFault):
                    log.exception("the prefill engine at %s cannot be reached", self.bootstrap)
                    error = TransferError(f"{type(error).__name__}: {error}", where=self.bootstrap)
                with self._lock:
                    waiting, self._waiting, self._thread = self._waiting, [], None
                for one in waiting:
                    one.fail(error)
                return
            else:
                with self._lock:
                    waiting, self._waiting, self._thread = self._waiting, [], None
                    if not self._closed.is_set():
                        self._links = links
                self._connected(waiting, links)
                return

    def _connected(self, receivers: list[Receiver], links: list[Link]) -> None:
        lost = next((link for link in links if link.closed), None)
        for one in receivers:
            one.connected(links)
            if lost is not None:
                one.lost(lost, TransferPeerLost("the prefill side was lost", where=self.bootstrap))
        if lost is not None:
            self.lost(lost)


class ReceivingSide:
    """All transfers of the decode side, and the prefill engines they come from."""

    def __init__(
        self, memory: KVMemory, rows: MetadataBuffers, options: TransferOptions, connect: Connect
    ) -> None:
        self.memory, self.rows, self.options = memory, rows, options
        self.span = memory.layout.span
        self._connect = connect
        self._lock = threading.Lock()
        self._live: dict[int, Receiver] = {}
        self._peers: dict[str, Peer] = {}
        self.counts = {"received": 0, "receive_failures": 0}

    @property
    def live(self) -> int:
        return len(self._live)

    def receiver(self, bootstrap: str, bootstrap_id: int) -> Receiver:
        with self._lock:
            if bootstrap_id in self._live:
                raise BadRequest(f"room {bootstrap_id} is in use", where="bootstrap_room")
            peer = self._peers.get(bootstrap)
            if peer is None:
                peer = self._peers[bootstrap] = Peer(bootstrap, self._connect)
            receiver = self._live[bootstrap_id] = Receiver(bootstrap_id, self, peer)
        peer.add(receiver)
        return receiver

    def find(self, bootstrap_id: int) -> Receiver | None:
        return self._live.get(bootstrap_id)

    def take(self, link: Link, message: Any) -> None:
        """A message from a prefill side, except Chunk of a side that is fetched from."""
        receiver = self._live.get(message.bootstrap_id)
        if receiver is None:
            return
        match message:
            case RowData(_, row):
                receiver.row(link, row)
            case Done():
                receiver.done(link)
            case Fail(_, error):
                receiver.fail(from_dict(error), known_by=link)
            case Chunk():
                receiver.fail(TransferError("KV to be fetched came unasked", where=link.peer))

    def lost(self, link: Link, fault: RuntimeFault) -> None:
        with self._lock:
            receivers, peers = list(self._live.values()), list(self._peers.values())
        for peer in peers:
            peer.lost(link)
        for receiver in receivers:
            receiver.lost(link, fault)

    def close(self, fault: RuntimeFault) -> None:
        with self._lock:
            receivers, peers = list(self._live.values()), list(self._peers.values())
        for receiver in receivers:
            receiver.fail(fault)
        for peer in peers:
            peer.close()

    def ended(self, receiver: Receiver, fault: RuntimeFault | None) -> None:
        with self._lock:
            if self._live.get(receiver.bootstrap_id) is receiver:
                del self._live[receiver.bootstrap_id]
            self.counts["received" if fault is None else "receive_failures"] += 1
