"""The decode side of split prefill and decode, as a stage of the scheduler: a request gets slots for its
prompt, the prefill side fills them, and it is admitted with its KV and its first token.
Retracted requests keep their KV in host memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from runtime.disagg.peers import Peers, ended_by, failure_of, runs_of
from runtime.disagg.transfer.kv_manager import KVPoll, KVReceiver
from runtime.disagg.transfer.metadata import Metadata
from runtime.plan import Sample
from runtime.protocol.errors import BadRequest, InternalFault, RuntimeFault
from runtime.protocol.io_struct import FinishReason, TokenizedGenerateReqInput
from runtime.scheduler.admission import SHARED
from runtime.scheduler.requests.request import Request
from runtime.scheduler.stage import SchedulerParts, Settled, Stage


@dataclass(slots=True, eq=False)
class DecodeTransfer:
    """A request and its receiver. length: of the prompt; carries: whether KV really comes; behind: the
    transfer whose KV it waits for."""

    request: Request
    receiver: KVReceiver
    carries: bool
    length: int
    behind: DecodeTransfer | None = None
    since: float = field(default_factory=time.monotonic)


class DecodeStage(Stage):
    """Requests without a bootstrap server are answered by this engine alone. `reserved`: slots that are kept
    for the output of each admitted request."""

    def __init__(self, parts: SchedulerParts, *, peers: Peers, reserved: int) -> None:
        super().__init__(parts)
        self._peers, self._figures, self._reserved = peers, peers.figures, reserved
        # By seq, in order of arrival:
        self._prealloc: dict[int, DecodeTransfer] = {}  # without slots
        self._transfers: dict[int, DecodeTransfer] = {}  # their slots are being filled
        self._arrived: dict[int, DecodeTransfer] = {}  # complete, not admitted yet
        self._active: dict[int, Request] = {}  # admitted: running or retracted
        self._first: list[tuple[Request, Sample | None]] = []
        self._copies: dict[int, memoryview] = {}  # KV of retracted requests in host memory, by seq
        self._farewells: list[tuple[KVReceiver, str]] = []  # of requests that ended before the two sides met

    @property
    def awaiting(self) -> bool:
        return bool(self._prealloc or self._transfers or self._farewells)

    @property
    def delivered(self) -> bool:
        return bool(self._arrived)

    def refused(self, source: TokenizedGenerateReqInput, fault: RuntimeFault) -> None:
        if source.bootstrap is not None:
            with suppress(BadRequest):  # the id belongs to another request, or the host is not allowed
                receiver = self._peers.receiver(source.bootstrap)
                self._farewells.append((receiver, f"refused by the decode engine: {fault}"))

    def arrived(self, request: Request) -> None:
        bootstrap = request.source.bootstrap
        if bootstrap is None:
            return
        request.forgo_prompt_scores()
        carries = self._peers.manager(bootstrap).carries
        receiver = self._peers.receiver(bootstrap)
        self._prealloc[request.seq] = DecodeTransfer(request, receiver, carries, request.prompt_len)

    def poll(self, now: float) -> Iterable[Settled]:
        self._say_farewell()
        if not (self._prealloc or self._transfers):
            return ()
        settled: list[Settled] = []
        for seq, transfer in list(self._transfers.items()):
            try:
                if self._has_arrived(transfer):
                    self._arrived[seq] = self._transfers.pop(seq)
                    self._commit(transfer)
            except RuntimeFault as fault:
                settled.append((transfer.request, fault))
        closed = bool(self._copies)  # retracted requests come first
        for seq, transfer in list(self._prealloc.items()):
            poll = transfer.receiver.poll()
            if poll is KVPoll.Failed:
                settled.append((transfer.request, failure_of(transfer.receiver)))
            elif poll is KVPoll.WaitingForInput and not closed and not self._has_sibling(transfer):
                if self._preallocate(transfer):
                    self._transfers[seq] = self._prealloc.pop(seq)
                else:
                    closed = True  # no later one is tried, or a long prompt would never get its slots
        return settled

    def before_first_decode(self, request: Request) -> bool:
        return request.seq not in self._prealloc and request.seq not in self._transfers

    def admitted(self, request: Request, now: float) -> None:
        self._active[request.seq] = request
        transfer = self._arrived.pop(request.seq, None)
        if transfer is not None:
            metadata = transfer.receiver.metadata
            assert metadata is not None
            request.cached = min(metadata.cached_tokens, request.prompt_len)
            sample = _first_sample(request, metadata)
            if sample is None and request.ending is None and request.computed == len(request.tokens):
                # The first token that came cannot be used; its logits are needed again.
                lease, last = request.lease, len(request.tokens) - 1
                assert lease is not None
                request.computed = self.manager.cut(lease, request.tokens, request.computed, last)
            self._first.append((request, sample))
        super().admitted(request, now)

    def first_tokens(self) -> Iterable[tuple[Request, Sample | None]]:
        if not self._first:
            return ()
        first, self._first = self._first, []
        return first

    def offload(self, request: Request) -> None:
        if request.lease is not None and request.computed:
            memory = self._peers.memory
            runs = runs_of(request.lease, self.manager.cache, 0, request.computed)
            self._copies[request.seq] = memory.read(runs, memory.layout.span, "token")
            self._figures.offloaded += 1

    def restore(self, request: Request) -> None:
        """Write the part of the copy that the cache lacks into its new slots."""
        copy, lease = self._copies.pop(request.seq, None), request.lease
        if copy is None or lease is None:
            return
        memory, start = self._peers.memory, request.computed
        size = memory.layout.token_bytes(memory.layout.heads)
        end = min(copy.nbytes // size, request.matchable)
        if end > start:
            runs = lease.take(end - start)
            memory.write(runs, memory.layout.span, "token", copy[start * size : end * size])
            lease.settle()
            request.computed = end
            self.manager.publish(lease, request.tokens, request.settled)
        self._figures.restored += 1

    def closing(self, request: Request, reason: FinishReason) -> None:
        seq = request.seq
        self._active.pop(seq, None)
        self._copies.pop(seq, None)
        transfer = (
            self._prealloc.pop(seq, None) or self._transfers.pop(seq, None) or self._arrived.pop(seq, None)
        )
        if transfer is None:
            return
        if reason.type == "abort":
            self._figures.failed += 1
        self._farewells.append((transfer.receiver, ended_by("decode", reason)))
        self._say_farewell()

    def void(self) -> Iterable[Settled]:
        lost: list[Settled] = []
        for transfer in self._transfers.values():
            transfer.receiver.abort("the decode engine's slots are void")
            fault = InternalFault("the KV of its prompt is void", hint="send it again")
            lost.append((transfer.request, fault))
        for transfer in self._arrived.values():  # these compute their prompts themselves
            transfer.request.computed = 0
        self._arrived.clear()
        return lost

    def state(self) -> Mapping[str, Any]:
        return {
            "num_decode_prealloc_queue_reqs": len(self._prealloc),
            "num_decode_transfer_queue_reqs": len(self._transfers),
            "num_host_copies": len(self._copies),
            **self._peers.state(len(self._transfers)),
        }

    def _has_sibling(self, transfer: DecodeTransfer) -> bool:
        """Whether another transfer brings KV that it needs: then it waits, and gets it from the cache."""
        request, manager = transfer.request, self.manager
        others = [one for one in self._transfers.values() if one.carries]
        if not others or not transfer.carries or not manager.shares:
            return False
        if any(one is transfer.behind for one in others):
            return True
        key = request.source.extra_key
        have = manager.cache.probe(request.tokens[: transfer.length - 1], key)
        need = have + max(SHARED, manager.page_size)
        if need >= transfer.length:
            return False
        head = request.tokens[:need]
        for one in others:
            other = one.request
            if one.length >= need and other.source.extra_key == key and other.tokens[:need] == head:
                transfer.behind = one
                return True
        return False

    def _preallocate(self, transfer: DecodeTransfer) -> bool:
        """Get slots for its prompt and its first token. False, and nothing: not now."""
        manager, request = self.manager, transfer.request
        if len(self._transfers) >= self._peers.most:
            return False
        prompt = request.tokens[: transfer.length]
        lease = manager.open(prompt[:-1], request.source.extra_key, request.source.priority)
        need = transfer.length + 1 - lease.covered
        if not self._fits(transfer, need) or not manager.grow(lease, need):
            manager.close(lease, (), 0)
            return False
        if not transfer.carries:
            lease.key = f"\0fake {request.seq}"  # what is in its slots must not be shared
        request.lease = lease
        manager.transfers.append(lease)
        transfer.receiver.init(lease.take(need - 1), lease.covered)
        return True

    def _fits(self, transfer: DecodeTransfer, need: int) -> bool:
        """Whether the requests before it keep what they need: each its reserve, and each by itself all that
        it may need, if all others that run are retracted."""
        held = [*self._transfers.values(), *self._arrived.values()]
        requests = [*self._active.values(), *[one.request for one in held]]
        if not requests:
            return True
        manager, ceil = self.manager, self.manager.allocator.ceil
        reserve = sum(min(self._reserved, request.to_come) for request in requests)
        if manager.available - ceil(need) < reserve:
            return False
        pinned = sum(ceil(one.length + 1) for one in (*held, transfer))
        most = max(ceil(request.most) for request in (*requests, transfer.request))
        return pinned + most <= manager.slots

    def _has_arrived(self, transfer: DecodeTransfer) -> bool:
        """Raises the error of a transfer that failed."""
        poll = transfer.receiver.poll()
        if poll is KVPoll.Failed:
            raise failure_of(transfer.receiver)
        return poll is KVPoll.Success

    def _commit(self, transfer: DecodeTransfer) -> None:
        """The prompt's KV is in the request's slots. Without a first token the last token of the prompt is
        computed again here, for its logits."""
        request, metadata = transfer.request, transfer.receiver.metadata
        lease = request.lease
        assert lease is not None
        assert metadata is not None
        lease.settle()
        request.computed = transfer.length
        if not metadata.output_ids:
            lease.rewind()
            request.computed -= 1
        # Of a constrained request with log-probabilities the last token may be computed again.
        self.manager.publish(lease, request.tokens, request.computed - request.returns_logprobs)
        self._figures.moved(transfer.length, time.monotonic() - transfer.since)

    def _say_farewell(self) -> None:
        """Abort the transfers of requests that have ended, once the other side can be notified."""
        waiting: list[tuple[KVReceiver, str]] = []
        for receiver, why in self._farewells:
            if receiver.poll() is KVPoll.Bootstrapping:
                waiting.append((receiver, why))
            else:
                receiver.abort(why)
        self._farewells = waiting


def _first_sample(request: Request, metadata: Metadata) -> Sample | None:
    """The first token, if it is this request's next one."""
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
