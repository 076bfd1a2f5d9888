"""The prefill side of transfers: what decode ranks request, what was sent, and which ranks have it."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from runtime.disagg.transfer.kv_manager import KVPoll, KVSender, TransferOptions
from runtime.disagg.transfer.memory import KVMemory, Order, cut, tokens_of
from runtime.disagg.transfer.metadata import Metadata, MetadataBuffers
from runtime.disagg.transfer.net.link import Link
from runtime.disagg.transfer.net.messages import Chunk, Done, Fail, Received, RowData, Want
from runtime.disagg.transfer.net.streams import Piece
from runtime.plan import Run
from runtime.protocol.errors import BadRequest, RuntimeFault, TransferError, WireError, from_dict

log = logging.getLogger(__name__)

REMEMBERED = 10_000
"""Requests that came before their sender, and failures that a late decode rank or sender is notified of, at
most."""

Push = Callable[[Link, Piece], None]


class Sender(KVSender):
    """Created by SendingSide. Its links' threads call want(), received() and lost(), one thread the rest."""

    def __init__(self, bootstrap_id: int, side: SendingSide) -> None:
        super().__init__(bootstrap_id)
        self.start = 0
        self._side = side
        self._wants: dict[Link, Want] = {}
        self._done: set[Link] = set()
        self._tokens = self._sent = 0
        self._complete = False
        seconds = side.options.bootstrap_timeout
        self.progress.within(seconds, f"the decode side did not ask for it within {seconds:g} s")

    def init(self, tokens: int) -> None:
        with self.progress.lock:
            if self.progress.now is not KVPoll.WaitingForInput:
                return
            requested = next(iter(self._wants.values())).tokens
            if tokens != requested:
                self.fail(
                    TransferError(
                        f"the prefill side has {tokens} tokens from {self.start} on, the decode side made"
                        f" room for {requested}",
                        where=f"room {self.bootstrap_id}",
                        hint="both must be sent the same request",
                    )
                )
                return
            self._tokens = tokens
            seconds = self._side.options.waiting_timeout
            self.progress.within(seconds, f"its KV was not sent and taken within {seconds:g} s")
            self.progress.advance(KVPoll.Transferring)

    def send(self, runs: Sequence[Run], metadata: Metadata | None = None) -> None:
        with self.progress.lock:
            if self.progress.now is not KVPoll.Transferring:
                return
            first = self._sent
            self._sent += tokens_of(runs)
            if self._sent > self._tokens or (metadata is not None and self._sent < self._tokens):
                self.fail(
                    TransferError(
                        f"{self._sent} tokens were sent of {self._tokens}", where=f"room {self.bootstrap_id}"
                    )
                )
                return
            try:
                self._side.memory_check(runs)
                row = None if metadata is None else self._side.rows.pack(self.bootstrap_id, metadata)
                for link, want in self._wants.items():
                    if want.heads:
                        self._side.give(self, link, want, first, runs, row)
            except (TransferError, WireError) as error:
                self.fail(error)
                return
            self._complete = metadata is not None
            self._check_done()

    def want(self, link: Link, want: Want) -> None:
        """A decode rank requests tokens; when the last one has, the transfer begins."""
        with self.progress.lock:
            if self.progress.now is not KVPoll.Bootstrapping:
                return
            self._wants[link] = want
            wants = list(self._wants.values())
            if len({(one.start, one.tokens, one.ranks) for one in wants}) > 1:
                self.fail(
                    TransferError(
                        "the decode side's ranks do not want the same tokens",
                        where=f"room {self.bootstrap_id}",
                    )
                )
            elif len(wants) >= want.ranks:
                self.start = want.start
                seconds = self._side.options.waiting_timeout
                self.progress.within(seconds, f"its prompt was not computed within {seconds:g} s")
                self.progress.advance(KVPoll.WaitingForInput)

    def received(self, link: Link) -> None:
        with self.progress.lock:
            if self.progress.ended or not self._complete or link not in self._wants:
                return
            self._done.add(link)
            if link.pulls:
                # Its slots were kept until now, so the fetched KV is right.
                link.send(Done(self.bootstrap_id))
            self._check_done()

    def lost(self, link: Link, fault: RuntimeFault) -> None:
        with self.progress.lock:
            if link in self._wants and link not in self._done:
                self.fail(fault)

    def _check_done(self) -> None:
        if self._complete and all(link in self._done or not want.heads for link, want in self._wants.items()):
            self.progress.advance(KVPoll.Success)
            self._side.ended(self, None)

    def _notify_failed(self, known_by: Any = None) -> None:
        fault = self.progress.failure()
        assert fault is not None
        self._side.ended(self, fault)
        for link in self._wants:
            if link is not known_by:
                link.send(Fail(self.bootstrap_id, fault.to_dict()))


class _PoolPiece(Piece):
    """Some tokens of a transfer, read from the pool when a connection is free."""

    def __init__(self, sender: Sender, memory: KVMemory, first: int, runs: list[Run], heads: range) -> None:
        self.bootstrap_id, self.first, self.tokens = sender.bootstrap_id, first, tokens_of(runs)
        self.order: Order = memory.layout.order
        self._sender, self._memory, self._runs, self._heads = sender, memory, runs, heads

    def read(self) -> memoryview | None:
        with self._sender.progress.lock:
            if self._sender.progress.ended:
                return None
            return self._memory.read(self._runs, self._heads, self.order)

    def failed(self, fault: RuntimeFault) -> None:
        self._sender.fail(fault)


class SendingSide:
    """All transfers of the prefill side. push: sends a piece to a link that does not fetch KV itself."""

    def __init__(self, memory: KVMemory, rows: MetadataBuffers, options: TransferOptions, push: Push) -> None:
        self.memory, self.rows, self.options = memory, rows, options
        self._push, self._faults = push, options.faults
        self._lock = threading.Lock()
        self._live: dict[int, Sender] = {}
        self._early: OrderedDict[int, list[tuple[Link, Want]]] = OrderedDict()
        self._failed: OrderedDict[int, RuntimeFault] = OrderedDict()
        self.counts = {"sent": 0, "send_failures": 0}

    @property
    def live(self) -> int:
        return len(self._live)

    def sender(self, bootstrap_id: int) -> Sender:
        sender = Sender(bootstrap_id, self)
        with self._lock:
            if bootstrap_id in self._live:
                raise BadRequest(f"room {bootstrap_id} is in use", where="bootstrap_room")
            failed = self._failed.pop(bootstrap_id, None)
            early = self._early.pop(bootstrap_id, [])
            self._live[bootstrap_id] = sender
        if failed is not None:
            sender.fail(failed)
        for link, want in early:
            sender.want(link, want)
            if link.closed:
                sender.lost(link, TransferError("the decode side is gone", where=link.peer))
        if self._faults is not None and self._faults.happens("fail"):
            sender.fail(TransferError("a fault was injected", where=f"room {bootstrap_id}"))
        return sender

    def take(self, link: Link, message: Any) -> None:
        """A message from a decode side."""
        with self._lock:
            sender = self._live.get(message.bootstrap_id)
            if sender is None:
                failed = self._failed.get(message.bootstrap_id)
                match message:
                    case Want() if failed is None:
                        _remember(self._early, message.bootstrap_id, [])
                        self._early[message.bootstrap_id].append((link, message))
                    case Fail(bootstrap_id, error) if failed is None:
                        self._early.pop(bootstrap_id, None)
                        _remember(self._failed, bootstrap_id, from_dict(error))
        match message:
            case Want() if sender is not None:
                sender.want(link, message)
            case Want(bootstrap_id) if failed is not None:
                link.send(Fail(bootstrap_id, failed.to_dict()))
            case Received() if sender is not None:
                sender.received(link)
            case Fail(_, error) if sender is not None:
                sender.fail(from_dict(error), known_by=link)

    def lost(self, link: Link, fault: RuntimeFault) -> None:
        with self._lock:
            senders = list(self._live.values())
            for bootstrap_id, wants in list(self._early.items()):
                wants[:] = [one for one in wants if one[0] is not link]
                if not wants:
                    del self._early[bootstrap_id]
        for sender in senders:
            sender.lost(link, fault)

    def close(self, fault: RuntimeFault) -> None:
        with self._lock:
            senders = list(self._live.values())
        for sender in senders:
            sender.fail(fault)

    def ended(self, sender: Sender, fault: RuntimeFault | None) -> None:
        with self._lock:
            if self._live.get(sender.bootstrap_id) is sender:
                del self._live[sender.bootstrap_id]
            self.counts["sent" if fault is None else "send_failures"] += 1
            if fault is not None:
                _remember(self._failed, sender.bootstrap_id, fault)

    def memory_check(self, runs: Sequence[Run]) -> None:
        """Raises TransferError for slots outside of the pool: here, rather than in a thread that sends."""
        for run in runs:
            if run.start < 0 or run.length < 1 or run.start + run.length > self.memory.slots:
                raise TransferError(f"{run} is not within {self.memory.slots} slots", where="KV pool")

    def give(
        self, sender: Sender, link: Link, want: Want, first: int, runs: Sequence[Run], row: bytes | None
    ) -> None:
        """Send some tokens, and maybe the metadata, to a decode rank."""
        faults = self._faults
        if link.pulls:
            if runs:
                link.send(Chunk(sender.bootstrap_id, first, tuple(runs)))
        else:
            heads = range(want.first, want.first + want.heads)
            size = max(1, self.options.piece_bytes // self.memory.layout.token_bytes(want.heads))
            count = tokens_of(runs)
            for at in range(0, count, size):
                part = cut(runs, at, min(size, count - at))
                self._push(link, _PoolPiece(sender, self.memory, first + at, part, heads))
        if faults is not None and faults.happens("cut"):
            # Before the metadata: a side that has everything could succeed before it sees the cut.
            link.break_off(TransferError("the link was cut by an injected fault", where=link.peer))
        elif row is not None:
            self._send_row(sender, link, row)

    def _send_row(self, sender: Sender, link: Link, row: bytes) -> None:
        faults = self._faults
        if faults is None:
            link.send(RowData(sender.bootstrap_id, row))
            return
        sent = faults.on_row(row)
        if sent is None:
            return
        message = RowData(sender.bootstrap_id, sent)
        if faults.happens("delay"):
            timer = threading.Timer(faults.rates.delay_s, link.send, [message])
            timer.daemon = True
            timer.start()
        else:
            link.send(message)


def _remember(table: OrderedDict[int, Any], bootstrap_id: int, entry: Any) -> None:
    table.setdefault(bootstrap_id, entry)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
