"""The prefill side of split prefill and decode, as a stage of the one scheduler: a request waits until the
decode side has made room (PrefillBootstrapQueue), its prompt is computed as any other's and sent chunk by
chunk while the next chunk is computed, and it ends, with its first token, once the decode side has all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from runtime.cache.manager import CacheManager
from runtime.disagg.peers import Peers, ended_by, runs_of
from runtime.disagg.transfer.kv_manager import KVPoll, KVSender
from runtime.disagg.transfer.metadata import Metadata, MetadataAllocator
from runtime.plan import Sample
from runtime.protocol.errors import BadRequest, InternalFault, RuntimeFault
from runtime.protocol.io_struct import FinishReason, TokenizedGenerateReqInput
from runtime.scheduler.requests.request import Request
from runtime.scheduler.requests.stop import LENGTH
from runtime.scheduler.scheduler_base import Counters, Deadlines
from runtime.scheduler.sessions import Sessions
from runtime.scheduler.stage import Settled, Stage


class PrefillRoom:
    """A request and its sender. length: of the prompt; sent: tokens of it that the decode side has, or is
    being sent; row: its metadata row, -1 before it is bootstrapped; over: everything was sent."""

    __slots__ = ("length", "metadata", "over", "request", "row", "sender", "sent", "since")

    def __init__(self, request: Request, sender: KVSender) -> None:
        self.request, self.sender = request, sender
        self.length = request.prompt_len
        self.sent, self.row, self.over = 0, -1, False
        self.metadata = Metadata(())
        self.since = time.monotonic()


class PrefillBootstrapQueue:
    """Requests whose decode side has not made room yet. `rows`: as many can be computed and sent at once."""

    def __init__(self, rows: MetadataAllocator) -> None:
        self._rows = rows
        self._rooms: dict[int, PrefillRoom] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, seq: int) -> bool:
        return seq in self._rooms

    def add(self, room: PrefillRoom) -> None:
        self._rooms[room.request.seq] = room

    def remove(self, seq: int) -> PrefillRoom | None:
        return self._rooms.pop(seq, None)

    def pop_bootstrapped(self) -> tuple[list[PrefillRoom], list[Settled]]:
        """Those that can be computed now, taken out; and those that failed, which stay until removed."""
        ready: list[PrefillRoom] = []
        failed: list[Settled] = []
        for seq, room in list(self._rooms.items()):
            match room.sender.poll():
                case KVPoll.Failed:
                    failed.append((room.request, fault_of(room.sender)))
                case KVPoll.WaitingForInput:
                    row = self._rows.alloc()
                    if row is None:
                        continue  # the others are polled all the same: they have deadlines
                    room.row, room.sent = row, room.sender.start
                    room.sender.init(room.length - room.sent)
                    ready.append(self._rooms.pop(seq))
        return ready, failed


class PrefillStage(Stage):
    """Requests without a room are answered by this engine alone."""

    def __init__(
        self,
        manager: CacheManager,
        counters: Counters,
        deadlines: Deadlines[Request],
        sessions: Sessions,
        *,
        peers: Peers,
    ) -> None:
        super().__init__(manager, counters, deadlines, sessions)
        self._peers = peers
        self._queue = PrefillBootstrapQueue(peers.rows)
        self._rooms: dict[int, PrefillRoom] = {}  # bootstrapped
        self._figures = peers.figures

    @property
    def awaiting(self) -> bool:
        return bool(self._queue or self._rooms)

    def refused(self, source: TokenizedGenerateReqInput, fault: RuntimeFault) -> None:
        if source.bootstrap is not None:
            with suppress(BadRequest):  # a room in use is another request's
                self._peers.sender(source.bootstrap).abort(f"refused by the prefill engine: {fault}")

    def arrived(self, request: Request) -> None:
        bootstrap = request.source.bootstrap
        if bootstrap is not None:
            request.prompt_only = True
            self._queue.add(PrefillRoom(request, self._peers.sender(bootstrap)))

    def poll(self, now: float) -> Iterable[Settled]:
        if not self._queue and not self._rooms:
            return ()
        ready, settled = self._queue.pop_bootstrapped()
        for room in self._rooms.values():
            poll = room.sender.poll()
            if poll is KVPoll.Failed:
                settled.append((room.request, fault_of(room.sender)))
            elif poll is KVPoll.Success and room.over:
                settled.append((room.request, None))
                self._figures.moved(room.length, time.monotonic() - room.since)
        self._rooms |= {room.request.seq: room for room in ready}
        return settled

    def before_first_decode(self, request: Request) -> bool:
        return request.seq not in self._queue

    def chunk_done(self, request: Request) -> None:
        room = self._rooms.get(request.seq)
        if room is not None:
            self._send_kv_chunk(room)

    def prompt_done(self, request: Request, sample: Sample, now: float) -> None:
        super().prompt_done(request, sample, now)
        room = self._rooms.get(request.seq)
        if room is None or request.ending is not None:
            return
        guide = request.guide
        if request.produced == 0 and request.healing is None and not (guide is not None and guide.dead_end):
            request.decode_steps += 1
            request.append(sample.token, sample.logprob, sample.top, sample.token_ids)
            room.metadata = Metadata(
                (sample.token,),
                request.cached,
                (sample.logprob,),
                (sample.top,),
                (sample.token_ids,),
            )
        else:
            # What was sampled follows forced tokens, or is the prompt's end chosen anew: the decode side
            # samples it again, from a prompt that lacks one token.
            room.metadata = Metadata((), request.cached)
        request.end(LENGTH)

    def holds(self, request: Request) -> bool:
        room = self._rooms.get(request.seq)
        if room is None:
            return False
        self._send_kv_chunk(room, last=True)
        return True

    def closing(self, request: Request, reason: FinishReason) -> None:
        room = self._queue.remove(request.seq) or self._rooms.pop(request.seq, None)
        if room is None:
            return
        if reason.type == "abort":
            self._figures.failed += 1
        room.sender.abort(ended_by("prefill", reason))  # of one that succeeded: without effect
        if room.row >= 0:
            self._peers.rows.release(room.row)

    def void(self) -> Iterable[Settled]:
        lost = []
        for room in self._rooms.values():
            room.sender.abort("the prefill engine's KV is void")
            lost.append((room.request, InternalFault("the KV of its prompt is void", hint="send it again")))
        return lost

    def state(self) -> Mapping[str, Any]:
        inflight = sum(room.over for room in self._rooms.values())
        return {
            "num_prefill_bootstrap_queue_reqs": len(self._queue),
            "num_prefill_inflight_queue_reqs": inflight,
            **self._peers.state(),
        }

    def _send_kv_chunk(self, room: PrefillRoom, *, last: bool = False) -> None:
        """What of its prompt has KV and was not sent; whole pages, but for the last of it."""
        request = room.request
        assert request.lease is not None
        end = min(request.computed, room.length)
        if not last:
            end -= end % self.manager.page_size
            if end > room.sent:
                room.sender.send(runs_of(request.lease, self.manager.cache, room.sent, end))
                room.sent = end
        elif not room.over:
            runs = runs_of(request.lease, self.manager.cache, room.sent, max(end, room.sent))
            room.sent, room.over = room.length, True
            room.sender.send(runs, room.metadata)


def fault_of(end: KVSender) -> RuntimeFault:
    return end.failure() or InternalFault(f"the transfer of room {end.room} failed for no reason")
