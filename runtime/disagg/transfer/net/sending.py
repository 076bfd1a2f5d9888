"""The prefill side of rooms: who wants what, what was sent, and who has it."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from runtime.disagg.transfer.kv_manager import KVPoll, KVSender, Progress, TransferOptions, check_room
from runtime.disagg.transfer.memory import KVMemory, Order, cut, tokens_of
from runtime.disagg.transfer.metadata import Metadata, MetadataBuffers
from runtime.disagg.transfer.net.link import Link
from runtime.disagg.transfer.net.messages import Chunk, Done, Fail, Got, RowData, Want
from runtime.disagg.transfer.net.streams import Piece
from runtime.plan import Run
from runtime.protocol.errors import Aborted, BadRequest, RuntimeFault, TransferError, WireError, from_dict

log = logging.getLogger(__name__)

REMEMBERED = 10_000
"""Rooms that one side spoke of before the other; and of those that failed, so that who comes late is told."""

Push = Callable[[Link, Piece], None]


class Sender(KVSender):
    """Made by SendingSide. Its links' threads call take(), one thread the rest."""

    def __init__(self, room: int, side: SendingSide) -> None:
        self.room, self.start = room, 0
        self.progress = Progress(room)
        self._side = side
        self._wants: dict[Link, Want] = {}
        self._done: set[Link] = set()
        self._tokens = self._sent = 0
        self._complete = False
        seconds = side.options.bootstrap_timeout
        self.progress.within(seconds, f"the decode side did not ask for it within {seconds:g} s")

    def poll(self) -> KVPoll:
        if self.progress.overdue():
            self._tell_failed()
        return self.progress.now

    def failure(self) -> RuntimeFault | None:
        return self.progress.failure()

    def init(self, tokens: int) -> None:
        with self.progress.lock:
            if self.progress.now is not KVPoll.WaitingForInput:
                return
            wanted = next(iter(self._wants.values())).tokens
            if tokens != wanted:
                self.fail(
                    TransferError(
                        f"the prefill side has {tokens} tokens from {self.start} on, the decode side made"
                        f" room for {wanted}",
                        where=f"room {self.room}",
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
                        f"{self._sent} tokens were sent of {self._tokens}", where=f"room {self.room}"
                    )
                )
                return
            try:
                self._side.memory_check(runs)
                row = None if metadata is None else self._side.rows.pack(self.room, metadata)
                for link, want in self._wants.items():
                    if want.heads:
                        self._side.give(self, link, want, first, runs, row)
            except (TransferError, WireError) as error:
                self.fail(error)
                return
            self._complete = metadata is not None
            self._check_done()

    def abort(self, reason: str = "aborted") -> None:
        self.fail(Aborted(reason, where=f"room {self.room}"))

    def fail(self, fault: RuntimeFault, *, told: Link | None = None) -> None:
        """told: who knows already."""
        if self.progress.fail(fault):
            self._tell_failed(told)

    def want(self, link: Link, want: Want) -> None:
        """A decode rank has said what it wants; the last of them lets the room begin."""
        with self.progress.lock:
            if self.progress.now is not KVPoll.Bootstrapping:
                return
            self._wants[link] = want
            asked = list(self._wants.values())
            if len({(one.start, one.tokens, one.ranks) for one in asked}) > 1:
                self.fail(
                    TransferError(
                        "the decode side's ranks do not want the same tokens", where=f"room {self.room}"
                    )
                )
            elif len(asked) >= want.ranks:
                self.start = want.start
                seconds = self._side.options.waiting_timeout
                self.progress.within(seconds, f"its prompt was not computed within {seconds:g} s")
                self.progress.advance(KVPoll.WaitingForInput)

    def got(self, link: Link) -> None:
        with self.progress.lock:
            if self.progress.ended or not self._complete or link not in self._wants:
                return
            self._done.add(link)
            if link.pulls:
                # Its slots were kept until now, so what was fetched from them is right.
                link.send(Done(self.room))
            self._check_done()

    def lost(self, link: Link, fault: RuntimeFault) -> None:
        with self.progress.lock:
            if link in self._wants and link not in self._done:
                self.fail(fault)

    def _check_done(self) -> None:
        if self._complete and all(link in self._done or not want.heads for link, want in self._wants.items()):
            self.progress.advance(KVPoll.Success)
            self._side.ended(self, None)

    def _tell_failed(self, told: Link | None = None) -> None:
        fault = self.progress.failure()
        assert fault is not None
        self._side.ended(self, fault)
        for link in self._wants:
            if link is not told:
                link.send(Fail(self.room, fault.to_dict()))


class _PoolPiece(Piece):
    """Some of a room's tokens, read from the pool when there is a connection for them."""

    def __init__(self, sender: Sender, memory: KVMemory, first: int, runs: list[Run], heads: range) -> None:
        self.room, self.first, self.tokens = sender.room, first, tokens_of(runs)
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
    """All rooms of the prefill side. push: how a piece gets to a link that fetches nothing itself."""

    def __init__(self, memory: KVMemory, rows: MetadataBuffers, options: TransferOptions, push: Push) -> None:
        self.memory, self.rows, self.options = memory, rows, options
        self._push, self._faults = push, options.faults
        self._lock = threading.Lock()
        self._rooms: dict[int, Sender] = {}
        self._early: OrderedDict[int, list[tuple[Link, Want]]] = OrderedDict()
        self._failed: OrderedDict[int, RuntimeFault] = OrderedDict()
        self.counts = {"sent": 0, "send_failures": 0}

    @property
    def live(self) -> int:
        return len(self._rooms)

    def sender(self, room: int) -> Sender:
        check_room(room)
        sender = Sender(room, self)
        with self._lock:
            if room in self._rooms:
                raise BadRequest(f"room {room} is in use", where="bootstrap_room")
            failed = self._failed.pop(room, None)
            early = self._early.pop(room, [])
            self._rooms[room] = sender
        if failed is not None:
            sender.fail(failed)
        for link, want in early:
            sender.want(link, want)
            if link.closed:
                sender.lost(link, TransferError("the decode side is gone", where=link.peer))
        if self._faults is not None and self._faults.happens("fail"):
            sender.fail(TransferError("a fault was injected", where=f"room {room}"))
        return sender

    def take(self, link: Link, message: Any) -> None:
        """A message from a decode side."""
        with self._lock:
            sender = self._rooms.get(message.room)
            if sender is None:
                failed = self._failed.get(message.room)
                match message:
                    case Want() if failed is None:
                        _remember(self._early, message.room, [])
                        self._early[message.room].append((link, message))
                    case Fail(room, error) if failed is None:
                        self._early.pop(room, None)
                        _remember(self._failed, room, from_dict(error))
        match message:
            case Want() if sender is not None:
                sender.want(link, message)
            case Want(room) if failed is not None:
                link.send(Fail(room, failed.to_dict()))
            case Got() if sender is not None:
                sender.got(link)
            case Fail(_, error) if sender is not None:
                sender.fail(from_dict(error), told=link)

    def lost(self, link: Link, fault: RuntimeFault) -> None:
        with self._lock:
            senders = list(self._rooms.values())
            for room, wants in list(self._early.items()):
                wants[:] = [one for one in wants if one[0] is not link]
                if not wants:
                    del self._early[room]
        for sender in senders:
            sender.lost(link, fault)

    def close(self, fault: RuntimeFault) -> None:
        with self._lock:
            senders = list(self._rooms.values())
        for sender in senders:
            sender.fail(fault)

    def ended(self, sender: Sender, fault: RuntimeFault | None) -> None:
        with self._lock:
            if self._rooms.get(sender.room) is sender:
                del self._rooms[sender.room]
            self.counts["sent" if fault is None else "send_failures"] += 1
            if fault is not None:
                _remember(self._failed, sender.room, fault)

    def memory_check(self, runs: Sequence[Run]) -> None:
        """Raises TransferError for slots that are none, now and not in some thread."""
        for run in runs:
            if run.start < 0 or run.length < 1 or run.start + run.length > self.memory.slots:
                raise TransferError(f"{run} is not within {self.memory.slots} slots", where="KV pool")

    def give(
        self, sender: Sender, link: Link, want: Want, first: int, runs: Sequence[Run], row: bytes | None
    ) -> None:
        """Some tokens, and maybe the metadata, on their way to who wants them."""
        faults = self._faults
        if link.pulls:
            if runs:
                link.send(Chunk(sender.room, first, tuple(runs)))
        else:
            heads = range(want.first, want.first + want.heads)
            size = max(1, self.options.piece_bytes // self.memory.layout.token_bytes(want.heads))
            count = tokens_of(runs)
            for at in range(0, count, size):
                part = cut(runs, at, min(size, count - at))
                self._push(link, _PoolPiece(sender, self.memory, first + at, part, heads))
        if faults is not None and faults.happens("cut"):
            # Before the metadata: a side that has all could end well before it sees the cut.
            link.break_off(TransferError("the link was cut by an injected fault", where=link.peer))
        elif row is not None:
            self._send_row(sender, link, row)

    def _send_row(self, sender: Sender, link: Link, row: bytes) -> None:
        faults = self._faults
        if faults is None:
            link.send(RowData(sender.room, row))
            return
        sent = faults.on_row(row)
        if sent is None:
            return
        message = RowData(sender.room, sent)
        if faults.happens("delay"):
            timer = threading.Timer(faults.rates.delay_s, link.send, [message])
            timer.daemon = True
            timer.start()
        else:
            link.send(message)


def _remember(table: OrderedDict[int, Any], room: int, what: Any) -> None:
    """Without what is too old."""
    table.setdefault(room, what)
    while len(table) > REMEMBERED:
        table.popitem(last=False)
