"""The decode side of transfers: where KV goes, which of it has arrived, and the prefill engines it comes
from."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runtime.disagg.transfer.kv_manager import KVPoll, KVReceiver, TransferOptions
from runtime.disagg.transfer.memory import KVMemory, check_slots, cut, tokens_of
from runtime.disagg.transfer.metadata import unpack
from runtime.disagg.transfer.net.link import Link
from runtime.disagg.transfer.net.messages import Done, Fail, Received, RowData, Want
from runtime.disagg.transfer.net.side import Side, SocketEnd
from runtime.disagg.transfer.net.streams import Arrived
from runtime.plan import Run
from runtime.protocol.errors import (
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

Connect = Callable[[str], Link]
"""Find the prefill engine of a bootstrap server and connect to it; blocks. Raises TransferPeerLost, if
another attempt may succeed, and other TransferErrors."""


class Receiver(SocketEnd, KVReceiver):
    """Threads of links and streams deliver messages and pieces, one thread calls the rest."""

    def __init__(self, bootstrap_id: int, side: ReceivingSide, peer: Peer) -> None:
        super().__init__(bootstrap_id, side)
        self._peer = peer
        self._runs: list[Run] = []
        self._missing: Any = np.ones(0, dtype=bool)  # per token: it has not arrived
        self._received = self._confirmed = False
        self.progress.within(side.options.bootstrap_timeout, self._unreached)

    def _unreached(self) -> str:
        seconds = self._side.options.bootstrap_timeout
        return f"the prefill side was not reached within {seconds:g} s: {self._peer.trouble}"

    def init(self, runs: Sequence[Run], start: int) -> None:
        side, link = self._side, self._link
        with self.progress.lock:
            if self.progress.now is not KVPoll.WaitingForInput or link is None:
                return None
            try:
                check_slots(side.memory.layout, side.memory.slots, runs, side.memory.layout.span)
            except TransferError as error:
                return self.fail(error)
            self._runs = list(runs)
            self._missing = np.ones(tokens_of(runs), dtype=bool)
            seconds = side.options.waiting_timeout
            self.progress.within(seconds, f"its KV did not arrive within {seconds:g} s")
            self.progress.advance(KVPoll.Transferring)
            link.send(Want(self.bootstrap_id, start, len(self._missing)))

    # -- messages and pieces ---------------------------------------------------------------------------------

    def connected(self, link: Link) -> None:
        with self.progress.lock:
            if self.progress.now is KVPoll.Bootstrapping:
                self._link = link
                self.progress.within(None)
                self.progress.advance(KVPoll.WaitingForInput)

    def piece(self, link: Link, arrived: Arrived) -> None:
        if arrived.fault is not None:
            return self.fail(arrived.fault)
        memory = self._side.memory

        def write(runs: list[Run]) -> None:
            memory.write(runs, memory.layout.span, arrived.order, arrived.data)

        self.write_tokens(link, arrived.first, arrived.tokens, write)

    def write_tokens(self, link: Link, first: int, tokens: int, write: Callable[[list[Run]], None]) -> bool:
        """Have `write` write these tokens into their slots, unless the transfer has ended; returns whether it
        did. A TransferError of `write` is the transfer's failure."""
        with self.progress.lock:
            if self.progress.now is not KVPoll.Transferring or link is not self._link:
                return False
            missing = self._missing
            inside = first >= 0 and tokens >= 1 and first + tokens <= len(missing)
            if not inside or not missing[first : first + tokens].all():
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

    def row(self, link: Link, row: bytes) -> None:
        with self.progress.lock:
            if self.progress.now is not KVPoll.Transferring or self.metadata or link is not self._link:
                return None
            try:
                self.metadata = unpack(self.bootstrap_id, row)
            except TransferCorrupt as error:
                return self.fail(error)
            self._check_done()

    def done(self) -> None:
        with self.progress.lock:
            self._confirmed = True
            self._check_done()

    def _check_done(self) -> None:
        link = self._link
        if self.progress.now is not KVPoll.Transferring or link is None:
            return
        if not self._received and self.metadata is not None and not self._missing.any():
            self._received = True
            link.send(Received(self.bootstrap_id))
        if self._received and (self._confirmed or not link.pulls):
            self.progress.advance(KVPoll.Success)
            self._side.ended(self, None)


class Peer:
    """A prefill engine, by its bootstrap server: connected to when a transfer needs it."""

    def __init__(self, bootstrap: str, connect: Connect) -> None:
        self.bootstrap = bootstrap
        self.trouble = "no attempt has ended yet"
        self._connect = connect
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._waiting: list[Receiver] = []
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def add(self, receiver: Receiver) -> None:
        with self._lock:
            link = self._link
            if link is None or link.closed:
                self._link = link = None
                self._waiting.append(receiver)
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name=f"transfer to {self.bootstrap}", daemon=True
                    )
                    self._thread.start()
        if link is not None:
            self._connected([receiver], link)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            link, self._link = self._link, None
        if link is not None:
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
                link = self._connect(self.bootstrap)
            except Exception as error:
                if isinstance(error, TransferPeerLost) and time.monotonic() < until:
                    self.trouble = str(error)
                    self._closed.wait(pause)
                    pause = min(2 * pause, AGAIN_S[1])
                    continue
                if not isinstance(error, RuntimeFault):
                    log.exception("the prefill engine at %s cannot be reached", self.bootstrap)
                    error = TransferError(f"{type(error).__name__}: {error}", where=self.bootstrap)
                for one in self._stop_waiting(None):
                    one.fail(error)
                return
            self._connected(self._stop_waiting(link), link)
            return

    def _stop_waiting(self, link: Link | None) -> list[Receiver]:
        with self._lock:
            waiting, self._waiting, self._thread = self._waiting, [], None
            if not self._closed.is_set():
                self._link = link
        return waiting

    def _connected(self, receivers: list[Receiver], link: Link) -> None:
        for one in receivers:
            one.connected(link)
            if link.closed:  # maybe before `one` had it, so that it was not reported
                one.lost(link, TransferPeerLost("the prefill side was lost", where=self.bootstrap))


class ReceivingSide(Side[Receiver]):
    """All transfers of the decode side, and the prefill engines they come from."""

    def __init__(self, memory: KVMemory, options: TransferOptions, connect: Connect) -> None:
        super().__init__(memory, options, "received", "receive_failures")
        self._connect = connect
        self._peers: dict[str, Peer] = {}

    def receiver(self, bootstrap: str, bootstrap_id: int) -> Receiver:
        with self._lock:
            self._check_unused(bootstrap_id)
            peer = self._peers.get(bootstrap)
            if peer is None:
                peer = self._peers[bootstrap] = Peer(bootstrap, self._connect)
            receiver = self._live[bootstrap_id] = Receiver(bootstrap_id, self, peer)
        peer.add(receiver)
        return receiver

    def take(self, link: Link, message: Any) -> None:
        """A message from a prefill side, except Chunk."""
        receiver = self._live.get(message.bootstrap_id)
        if receiver is None:
            return
        match message:
            case RowData(_, row):
                receiver.row(link, row)
            case Done():
                receiver.done()
            case Fail(_, error):
                receiver.fail(from_dict(error), notify=False)

    def close(self, fault: RuntimeFault) -> None:
        super().close(fault)
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
