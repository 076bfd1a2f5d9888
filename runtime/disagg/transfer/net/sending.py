"""The prefill side of transfers: what the decode side requests, what was sent, and whether it has arrived."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from runtime.disagg.transfer.kv_manager import KVPoll, KVSender, TransferOptions
from runtime.disagg.transfer.memory import KVMemory, check_slots, cut, tokens_of
from runtime.disagg.transfer.metadata import Metadata, pack
from runtime.disagg.transfer.net.link import Link
from runtime.disagg.transfer.net.messages import Chunk, Done, Fail, Received, RowData, Want
from runtime.disagg.transfer.net.side import Side, SocketEnd
from runtime.disagg.transfer.net.streams import PIECE_BYTES, Piece
from runtime.plan import Run
from runtime.protocol.errors import RuntimeFault, TransferError, WireError, from_dict

REMEMBERED = 10_000
"""Requests that came before their sender, and failures that a late decode side or sender is notified of, at
most."""


class Sender(SocketEnd, KVSender):
    """Created by SendingSide. Its link's thread calls want(), received() and lost(), one thread the rest."""

    _side: SendingSide

    def __init__(self, bootstrap_id: int, side: SendingSide) -> None:
        super().__init__(bootstrap_id, side)
        self.start = 0
        self._tokens = self._sent = 0
        self._complete = False
        seconds = side.options.bootstrap_timeout
        self.progress.within(seconds, f"the decode side did not ask for it within {seconds:g} s")

    def init(self, tokens: int) -> None:
        with self.progress.lock:
            if self.progress.now is not KVPoll.WaitingForInput:
                return None
            if tokens != self._tokens:
                return self.reject(
                    f"the prefill side has {tokens} tokens from {self.start} on, the decode side made"
                    f" room for {self._tokens}",
                    hint="both must be sent the same request",
                )
            seconds = self._side.options.waiting_timeout
            self.progress.within(seconds, f"its KV was not sent and taken within {seconds:g} s")
            self.progress.advance(KVPoll.Transferring)

    def send(self, runs: Sequence[Run], metadata: Metadata | None = None) -> None:
        side, link = self._side, self._link
        with self.progress.lock:
            if self.progress.now is not KVPoll.Transferring or link is None:
                return None
            first = self._sent
            self._sent += tokens_of(runs)
            if self._sent > self._tokens or (metadata is not None and self._sent < self._tokens):
                return self.reject(f"{self._sent} tokens were sent of {self._tokens}")
            try:
                # Slots outside of the pool are found here, rather than in a thread that sends.
                check_slots(side.memory.layout, side.memory.slots, runs, side.memory.layout.span)
                row = None if metadata is None else pack(self.bootstrap_id, metadata)
                side.give(self, link, first, runs, row)
            except (TransferError, WireError) as error:
                return self.fail(error)
            self._complete = metadata is not None

    def want(self, link: Link, want: Want) -> None:
        """The decode side requests tokens: the transfer begins."""
        with self.progress.lock:
            fault = self.progress.failure()
            if fault is not None:  # just now
                link.send(Fail(self.bootstrap_id, fault.to_dict()))
            if self.progress.now is not KVPoll.Bootstrapping:
                return
            self._link, self.start, self._tokens = link, want.start, want.tokens
            seconds = self._side.options.waiting_timeout
            self.progress.within(seconds, f"its prompt was not computed within {seconds:g} s")
            self.progress.advance(KVPoll.WaitingForInput)

    def received(self, link: Link) -> None:
        with self.progress.lock:
            if self.progress.ended or not self._complete or link is not self._link:
                return
            if link.pulls:
                # Its slots were kept until now, so the fetched KV is right.
                link.send(Done(self.bootstrap_id))
            self.progress.advance(KVPoll.Success)
            self._side.ended(self, None)


class SendingSide(Side[Sender]):
    """All transfers of the prefill side."""

    def __init__(self, memory: KVMemory, options: TransferOptions) -> None:
        super().__init__(memory, options, "sent", "send_failures")
        self._faults = options.faults
        self._early: OrderedDict[int, tuple[Link, Want]] = OrderedDict()
        self._failed: OrderedDict[int, RuntimeFault] = OrderedDict()

    def sender(self, bootstrap_id: int) -> Sender:
        sender = Sender(bootstrap_id, self)
        with self._lock:
            self._check_unused(bootstrap_id)
            failed = self._failed.pop(bootstrap_id, None)
            early = self._early.pop(bootstrap_id, None)
            self._live[bootstrap_id] = sender
        if failed is not None:
            sender.fail(failed)
        if early is not None:
            link, want = early
            sender.want(link, want)
            if link.closed:
                sender.lost(link, TransferError("the decode side is gone", where=link.peer))
        if self._faults is not None and self._faults.happens("fail"):
            sender.reject("a fault was injected")
        return sender

    def take(self, link: Link, message: Any) -> None:
        """A message from a decode side."""
        with self._lock:
            sender = self._live.get(message.bootstrap_id)
            if sender is None:
                failed = self._failed.get(message.bootstrap_id)
                match message:
                    case Want() if failed is None:
                        _remember(self._early, message.bootstrap_id, (link, message))
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
                sender.fail(from_dict(error), notify=False)

    def lost(self, link: Link, fault: RuntimeFault) -> None:
        with self._lock:
            for bootstrap_id in [key for key, (early, _) in self._early.items() if early is link]:
                del self._early[bootstrap_id]
        super().lost(link, fault)

    def ended(self, end: SocketEnd, fault: RuntimeFault | None) -> None:
        with self._lock:
            super().ended(end, fault)
            if fault is not None:
                _remember(self._failed, end.bootstrap_id, fault)

    def give(self, sender: Sender, link: Link, first: int, runs: Sequence[Run], row: bytes | None) -> None:
        """Send some tokens, and maybe the metadata, to the decode side."""
        faults, memory = self._faults, self.memory
        if link.streams is None:
            if runs:
                link.send(Chunk(sender.bootstrap_id, first, tuple(runs)))
        else:
            size = max(1, PIECE_BYTES // memory.layout.token_bytes(memory.layout.heads))
            count = tokens_of(runs)
            for at in range(0, count, size):
                part = cut(runs, at, min(size, count - at))
                link.streams.put(Piece(sender, memory, first + at, part))
        if faults is not None and faults.happens("cut"):
            # Before the metadata: a side that has everything could succeed before it sees the cut.
            link.break_off(TransferError("the link was cut by an injected fault", where=link.peer))
        elif row is not None:
            self._send_row(sender, link, row)

    def _send_row(self, sender: Sender, link: Link, row: bytes) -> None:
        faults = self._faults
        sent = row if faults is None else faults.on_row(row)
        if sent is None:
            return
        message = RowData(sender.bootstrap_id, sent)
        if faults is not None and faults.happens("delay"):
            timer = threading.Timer(faults.rates.delay_s, link.send, [message])
            timer.daemon = True
            timer.start()
        else:
            link.send(message)


def _remember(table: OrderedDict[int, Any], bootstrap_id: int, entry: Any) -> None:
    table.setdefault(bootstrap_id, entry)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
