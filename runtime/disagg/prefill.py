"""The prefill side of split prefill and decode, as a stage of the scheduler: a request waits until the decode
side has slots for it, its prompt is computed like any other and sent chunk by chunk
while the next chunk is computed, and it ends, with its first token, once the decode side has all of it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from runtime.disagg.peers import Peers, ended_by, failure_of, runs_of
from runtime.disagg.transfer.kv_manager import KVPoll, KVSender
from runtime.disagg.transfer.metadata import Metadata
from runtime.plan import Sample
from runtime.protocol.errors import BadRequest, InternalFault, RuntimeFault
from runtime.protocol.io_struct import FinishReason, TokenizedGenerateReqInput
from runtime.scheduler.requests.request import Request
from runtime.scheduler.requests.stop import LENGTH
from runtime.scheduler.stage import SchedulerParts, Settled, Stage


@dataclass(slots=True, eq=False)
class PrefillTransfer:
    """A request and its sender. length: of the prompt; sent: tokens of it that the decode side has, or is
    being sent; complete: everything was sent."""

    request: Request
    sender: KVSender
    length: int
    sent: int = 0
    complete: bool = False
    metadata: Metadata = field(default_factory=lambda: Metadata(()))
    since: float = field(default_factory=time.monotonic)


class PrefillStage(Stage):
    """Requests without a bootstrap server are answered by this engine alone."""

    def __init__(self, parts: SchedulerParts, *, peers: Peers) -> None:
        super().__init__(parts)
        self._peers, self._figures = peers, peers.figures
        self._queue: dict[int, PrefillTransfer] = {}  # the decode side has no slots yet
        self._transfers: dict[int, PrefillTransfer] = {}  # bootstrapped

    @property
    def awaiting(self) -> bool:
        return bool(self._queue or self._transfers)

    def refused(self, source: TokenizedGenerateReqInput, fault: RuntimeFault) -> None:
        if source.bootstrap is not None:
            with suppress(BadRequest):  # the id belongs to another request
                self._peers.sender(source.bootstrap).abort(f"refused by the prefill engine: {fault}")

    def arrived(self, request: Request) -> None:
        bootstrap = request.source.bootstrap
        if bootstrap is not None:
            request.prompt_only = True
            self._queue[request.seq] = PrefillTransfer(
                request, self._peers.sender(bootstrap), request.prompt_len
            )

    def poll(self, now: float) -> Iterable[Settled]:
        settled: list[Settled] = []
        for seq, transfer in [*self._transfers.items(), *self._queue.items()]:
            poll = transfer.sender.poll()
            if poll is KVPoll.Failed:
                settled.append((transfer.request, failure_of(transfer.sender)))
            elif poll is KVPoll.Success and transfer.complete:
                settled.append((transfer.request, None))
                self._figures.moved(transfer.length, time.monotonic() - transfer.since)
            elif poll is KVPoll.WaitingForInput and seq in self._queue:
                if len(self._transfers) >= self._peers.most:
                    continue  # the others are polled all the same: they have deadlines
                transfer.sent = transfer.sender.start
                transfer.sender.init(transfer.length - transfer.sent)
                self._transfers[seq] = self._queue.pop(seq)
        return settled

    def before_first_decode(self, request: Request) -> bool:
        return request.seq not in self._queue

    def chunk_done(self, request: Request) -> None:
        transfer = self._transfers.get(request.seq)
        if transfer is not None:
            self._send_kv_chunk(transfer)

    def prompt_done(self, request: Request, sample: Sample, now: float) -> None:
        super().prompt_done(request, sample, now)
        transfer = self._transfers.get(request.seq)
        if transfer is None or request.ending is not None:
            return
        guide = request.guide
        dead_end = guide is not None and guide.dead_end
        if request.produced == 0 and request.healing is None and not dead_end:
            request.decode_steps += 1
            request.append(sample.token, sample.logprob, sample.top, sample.token_ids)
            transfer.metadata = Metadata(
                (sample.token,), request.cached, (sample.logprob,), (sample.top,), (sample.token_ids,)
            )
        else:
            # The sample follows forced tokens, or is the prompt's end sampled again: the decode side samples
            # it once more, from a prompt that lacks one token.
            transfer.metadata = Metadata((), request.cached)
        request.end(LENGTH)

    def holds(self, request: Request) -> bool:
        transfer = self._transfers.get(request.seq)
        if transfer is None:
            return False
        self._send_kv_chunk(transfer, last=True)
        return True

    def closing(self, request: Request, reason: FinishReason) -> None:
        transfer = self._queue.pop(request.seq, None) or self._transfers.pop(request.seq, None)
        if transfer is None:
            return
        if reason.type == "abort":
            self._figures.failed += 1
        transfer.sender.abort(ended_by("prefill", reason))  # no effect if it succeeded

    def void(self) -> Iterable[Settled]:
        lost = []
        for transfer in self._transfers.values():
            transfer.sender.abort("the prefill engine's KV is void")
            fault = InternalFault("the KV of its prompt is void", hint="send it again")
            lost.append((transfer.request, fault))
        return lost

    def state(self) -> Mapping[str, Any]:
        inflight = sum(transfer.complete for transfer in self._transfers.values())
        return {
            "num_prefill_bootstrap_queue_reqs": len(self._queue),
            "num_prefill_inflight_queue_reqs": inflight,
            **self._peers.state(len(self._transfers)),
        }

    def _send_kv_chunk(self, transfer: PrefillTransfer, *, last: bool = False) -> None:
        """Send the part of its prompt that has KV and was not sent: whole pages, except for the last."""
        request = transfer.request
        assert request.lease is not None
        end = min(request.computed, transfer.length)
        if not last:
            end -= end % self.manager.page_size
            if end > transfer.sent:
                transfer.sender.send(runs_of(request.lease, self.manager.cache, transfer.sent, end))
                transfer.sent = end
        elif not transfer.complete:
            runs = runs_of(request.lease, self.manager.cache, transfer.sent, max(end, transfer.sent))
            transfer.sent, transfer.complete = transfer.length, True
            transfer.sender.send(runs, transfer.metadata)
