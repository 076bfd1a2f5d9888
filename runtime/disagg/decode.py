"""The decode side of split prefill and decode, as a stage of the one scheduler: a request gets slots for its
prompt (DecodePreallocQueue), the prefill side fills them (DecodeTransferQueue), and it is let in with its KV
and its first token. Who has to make way keeps its KV in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from runtime.cache.manager import CacheManager
from runtime.disagg.offload import HostCopies
from runtime.disagg.peers import Peers, ended_by
from runtime.disagg.transfer.kv_manager import KVPoll, KVReceiver
from runtime.disagg.transfer.metadata import Metadata
from runtime.plan import Sample
from runtime.protocol.errors import BadRequest, InternalFault, RuntimeFault
from runtime.protocol.io_struct import FinishReason, TokenizedGenerateReqInput
from runtime.scheduler.admission import SHARED
from runtime.scheduler.requests.request import Request
from runtime.scheduler.scheduler_base import Counters, Deadlines
from runtime.scheduler.sessions import Sessions
from runtime.scheduler.stage import Settled, Stage


class DecodeRoom:
    """A request and its receiver. length: of the prompt; index: its metadata row, -1 before it has slots;
    metadata: what came with the KV, None before that came; carries: whether KV really comes; behind: whose KV
    it waited for."""

    __slots__ = ("behind", "carries", "index", "length", "metadata", "receiver", "request", "since")

    def __init__(self, request: Request, receiver: KVReceiver, *, carries: bool) -> None:
        self.request, self.receiver, self.carries = request, receiver, carries
        self.length = request.prompt_len
        self.index = -1
        self.metadata: Metadata | None = None
        self.behind: DecodeRoom | None = None
        self.since = time.monotonic()

    def failed(self) -> Settled:
        fault = self.receiver.failure()
        room = self.receiver.room
        return self.request, fault or InternalFault(f"the transfer of room {room} failed for no reason")


class DecodePreallocQueue:
    """Requests without slots, in order of arrival. `reserved`: slots that each request further on keeps for
    its output."""

    def __init__(self, manager: CacheManager, peers: Peers, reserved: int) -> None:
        self._manager, self._peers, self._reserved = manager, peers, reserved
        self._rooms: dict[int, DecodeRoom] = {}

    def __len__(self) -> int:
        return len(self._rooms)

    def __contains__(self, seq: int) -> bool:
        return seq in self._rooms

    def add(self, room: DecodeRoom) -> None:
        self._rooms[room.request.seq] = room

    def remove(self, seq: int) -> DecodeRoom | None:
        return self._rooms.pop(seq, None)

    def pop_preallocated(
        self, held: list[DecodeRoom], active: Sequence[Request], *, closed: bool
    ) -> tuple[list[DecodeRoom], list[Settled]]:
        """Those that have slots now, taken out; and those that failed, which stay until removed. `held`: who
        has slots and does not run; it grows by those that are given. `active`: who ran. `closed`: nobody gets
        any now."""
        ready: list[DecodeRoom] = []
        failed: list[Settled] = []
        for seq, room in list(self._rooms.items()):
            poll = room.receiver.poll()
            if poll is KVPoll.Failed:
                failed.append(room.failed())
            elif poll is KVPoll.WaitingForInput and not closed:
                if self._has_sibling(room, held):
                    continue
                if self._preallocate(room, held, active):
                    ready.append(self._rooms.pop(seq))
                    held.append(room)
                else:
                    closed = True  # nobody behind it is tried, or a long prompt would never find room
        return ready, failed

    def _has_sibling(self, room: DecodeRoom, held: Sequence[DecodeRoom]) -> bool:
        """Whether KV that it needs comes for another request: then it waits, and finds it in the cache."""
        request, cache = room.request, self._manager.cache
        rooms = [one for one in held if one.metadata is None and one.carries]
        if not rooms or not room.carries or not self._manager.shares:
            return False
        if any(one is room.behind for one in rooms):
            return True
        key = request.source.extra_key
        have = cache.probe(request.tokens[: room.length - 1], key)
        need = have + max(SHARED, self._manager.page_size)
        if need >= room.length:
            return False
        head = request.tokens[:need]
        for one in rooms:
            other = one.request
            if one.length >= need and other.source.extra_key == key and other.tokens[:need] == head:
                room.behind = one
                return True
        return False

    def _preallocate(self, room: DecodeRoom, held: Sequence[DecodeRoom], active: Sequence[Request]) -> bool:
        """Slots for its prompt and its first token, and a metadata row. False, and none of it: not now."""
        manager, request = self._manager, room.request
        prompt = request.tokens[: room.length]
        lease = manager.open(prompt[:-1], request.source.extra_key, request.source.priority)
        need = room.length + 1 - lease.covered
        index = None
        if self._fits(room, need, held, active) and manager.grow(lease, need):
            index = self._peers.rows.alloc()
        if index is None:
            manager.close(lease, (), 0)
            return False
        if not room.carries:
            lease.key = f"\0fake {request.seq}"  # what is in its slots is of no use to anybody
        room.index = index
        request.lease = lease
        manager.transfers.append(lease)
        room.receiver.init(lease.take(need - 1), lease.covered, index)
        return True

    def _fits(
        self, room: DecodeRoom, need: int, held: Sequence[DecodeRoom], active: Sequence[Request]
    ) -> bool:
        """Whether those further on keep what they need: each its reserve, and each by itself all that it may
        come to need, if all others that run made way for it."""
        requests = [*active, *[one.request for one in held]]
        if not requests:
            return True
        reserve = sum(min(self._reserved, request.to_come) for request in requests)
        if self._manager.available - self._manager.allocator.ceil(need) < reserve:
            return False
        ceil = self._manager.allocator.ceil
        pinned = sum(ceil(one.length + 1) for one in (*held, room))
        most = max(ceil(request.most) for request in (*requests, room.request))
        return pinned + most <= self._manager.slots


class DecodeTransferQueue:
    """Requests whose slots are being filled."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.rooms: dict[int, DecodeRoom] = {}

    def __len__(self) -> int:
        return len(self.rooms)

    def add(self, room: DecodeRoom) -> None:
        self.rooms[room.request.seq] = room

    def remove(self, seq: int) -> DecodeRoom | None:
        return self.rooms.pop(seq, None)

    def pop_transferred(self) -> tuple[list[DecodeRoom], list[Settled]]:
        """Those whose KV and metadata are there, taken out; and those that failed, which stay until
        removed."""
        ready: list[DecodeRoom] = []
        failed: list[Settled] = []
        for seq, room in list(self.rooms.items()):
            match room.receiver.poll():
                case KVPoll.Failed:
                    failed.append(room.failed())
                case KVPoll.Success:
                    try:
                        room.metadata = self._peers.rows.buffers.read(room.index, room.receiver.room)
                    except RuntimeFault as fault:
                        failed.append((room.request, fault))
                        continue
                    if room.metadata is not None:
                        ready.append(self.rooms.pop(seq))
        return ready, failed


class DecodeStage(Stage):
    """Requests without a room are answered by this engine alone."""

    def __init__(
        self,
        manager: CacheManager,
        counters: Counters,
        deadlines: Deadlines[Request],
        sessions: Sessions,
        *,
        peers: Peers,
        reserved: int,
    ) -> None:
        super().__init__(manager, counters, deadlines, sessions)
        self._peers, self._figures = peers, peers.figures
        self._prealloc = DecodePreallocQueue(manager, peers, reserved)
        self._transfers = DecodeTransferQueue(peers)
        self._done: dict[int, DecodeRoom] = {}  # all is there, not let in yet
        self._active: dict[int, Request] = {}  # let in, running or retracted
        self._first: list[tuple[Request, Sample | None]] = []
        self._copies = HostCopies(manager, peers.memory)
        self._farewells: list[tuple[KVReceiver, str]] = []  # of requests that ended before the two sides met

    @property
    def awaiting(self) -> bool:
        return bool(self._prealloc or self._transfers or self._farewells)

    @property
    def delivered(self) -> bool:
        return bool(self._done)

    def refused(self, source: TokenizedGenerateReqInput, fault: RuntimeFault) -> None:
        if source.bootstrap is not None:
            with suppress(BadRequest):  # a room in use is another request's, or the host may not be named
                receiver = self._peers.receiver(source.bootstrap)
                self._farewells.append((receiver, f"refused by the decode engine: {fault}"))

    def arrived(self, request: Request) -> None:
        bootstrap = request.source.bootstrap
        if bootstrap is None:
            return
        request.forgo_prompt_scores()
        carries = self._peers.manager(bootstrap).carries
        self._prealloc.add(DecodeRoom(request, self._peers.receiver(bootstrap), carries=carries))

    def poll(self, now: float) -> Iterable[Settled]:
        if self._farewells:
            self._farewells = [one for one in self._farewells if not _told(*one)]
        if not (self._prealloc or self._transfers):
            return ()
        ready, settled = self._transfers.pop_transferred()
        for room in ready:
            try:
                self._commit(room)
            except RuntimeFault as fault:
                settled.append((room.request, fault))
            self._done[room.request.seq] = room
        held = [*self._transfers.rooms.values(), *self._done.values()]
        # Who was retracted comes first.
        closed = bool(self._copies)
        begun, failed = self._prealloc.pop_preallocated(held, list(self._active.values()), closed=closed)
        for room in begun:
            self._transfers.add(room)
        return settled + failed

    def before_first_decode(self, request: Request) -> bool:
        return request.seq not in self._prealloc and request.seq not in self._transfers.rooms

    def admitted(self, request: Request, now: float) -> None:
        self._active[request.seq] = request
        room = self._done.pop(request.seq, None)
        if room is not None:
            metadata = room.metadata
            assert metadata is not None
            request.cached = min(metadata.cached_tokens, request.prompt_len)
            sample = _first(request, metadata)
            if sample is None and request.ending is None and request.computed == len(request.tokens):
                self._recompute_last(request)
            self._first.append((request, sample))
        super().admitted(request, now)

    def first_tokens(self) -> Iterable[tuple[Request, Sample | None]]:
        if not self._first:
            return ()
        first, self._first = self._first, []
        return first

    def offload(self, request: Request) -> None:
        self._figures.offloaded += self._copies.save(request)

    def restore(self, request: Request) -> None:
        self._figures.restored += self._copies.restore(request)

    def closing(self, request: Request, reason: FinishReason) -> None:
        seq = request.seq
        self._active.pop(seq, None)
        self._copies.drop(request)
        room = self._prealloc.remove(seq) or self._transfers.remove(seq) or self._done.pop(seq, None)
        if room is None:
            return
        if reason.type == "abort":
            self._figures.failed += 1
        self._farewells.append((room.receiver, ended_by("decode", reason)))
        self._farewells = [one for one in self._farewells if not _told(*one)]
        self._free_row(room)

    def void(self) -> Iterable[Settled]:
        lost: list[Settled] = []
        for room in self._transfers.rooms.values():
            room.receiver.abort("the decode engine's slots are void")
            lost.append((room.request, InternalFault("the KV of its prompt is void", hint="send it again")))
        for room in self._done.values():  # it computes its prompt itself
            room.request.computed = 0
        self._done.clear()
        return lost

    def state(self) -> Mapping[str, Any]:
        return {
            "num_decode_prealloc_queue_reqs": len(self._prealloc),
            "num_decode_transfer_queue_reqs": len(self._transfers),
            "num_host_copies": len(self._copies),
            **self._peers.state(),
        }

    def _commit(self, room: DecodeRoom) -> None:
        """The prompt's KV is in the request's slots. Without a first token its last token is computed again
        here, so it is left out."""
        request, metadata = room.request, room.metadata
        self._free_row(room)
        lease = request.lease
        assert lease is not None
        assert metadata is not None
        lease.settle()
        request.computed = room.length
        if not metadata.output_ids:
            lease.rewind()
            request.computed -= 1
        # Of a constrained request whose log-probabilities are wanted the last token may be computed again.
        self.manager.publish(lease, request.tokens, request.computed - request.returns_logprobs)
        self._figures.moved(room.length, time.monotonic() - room.since)

    def _recompute_last(self, request: Request) -> None:
        """The first token that came is of no use; its logits are wanted again."""
        lease = request.lease
        assert lease is not None
        request.computed = self.manager.cut(lease, request.tokens, request.computed, len(request.tokens) - 1)

    def _free_row(self, room: DecodeRoom) -> None:
        if room.index >= 0:
            self._peers.rows.release(room.index)
            room.index = -1


def _told(receiver: KVReceiver, why: str) -> bool:
    """End it, once the other side can be told; whether it has ended."""
    if receiver.poll() is KVPoll.Bootstrapping:
        return False
    receiver.abort(why)
    return True


def _first(request: Request, metadata: Metadata) -> Sample | None:
    """The first token, where it is this request's next one."""
    guide = request.guide
    if (
        not metadata.output_ids
        or request.ending is not None
        or request.produced
        or request.healing is not None
        or (guide is not None and guide.dead_end)
    ):
        return None
    return Sample(
        metadata.output_ids[0],
        metadata.logprobs[0] if metadata.logprobs else None,
        metadata.top_logprobs[0] if metadata.top_logprobs else (),
        metadata.token_ids[0] if metadata.token_ids else (),
    )
