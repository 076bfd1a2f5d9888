"""Batching: running requests -> StepPlan (Batcher), and a row's result -> its request (Commit). Takes slots
from leases; decides no admission. It runs for every token of every request: hence the loops written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.cache.manager import CacheManager, Lease
from runtime.cache.node import Node
from runtime.config.scheduler import SchedulerConfig
from runtime.plan import Row, RowResult, Sample, Segment, StepPlan
from runtime.protocol.errors import InternalFault
from runtime.scheduler.guided.decoding import GuidedDecoding
from runtime.scheduler.requests.components import Logprobs
from runtime.scheduler.requests.drafting import Drafting
from runtime.scheduler.requests.images import ImageRegistry
from runtime.scheduler.requests.request import Request
from runtime.scheduler.running_batch import RunningBatch
from runtime.scheduler.scheduler_base import Outbox
from runtime.scheduler.speculation import Speculation
from runtime.scheduler.stage import Stage

HEALS = 1 << 62
"""Added to the step of draws that choose the end of a prompt: they differ from those of the output."""


class Flight(NamedTuple):
    """A plan that is launched and not committed: its rows, and the request of each. present: how many
    requests ran, in it or not."""

    requests: list[Request]
    rows: tuple[Row, ...]
    present: int


NO_FLIGHT = Flight([], (), 0)


class Batcher:
    """Builds plans. Between two plans with the same rows and an unchanged cache the shared segments are the
    same, so they are kept: a decode step costs the same however long the contexts are.

    `chunk`: tokens of prompts (and of forced text) in one plan. `drafts`: guesses tokens; None: no guesses.
    `images`: loads the images of a plan.
    """

    def __init__(
        self,
        manager: CacheManager,
        config: SchedulerConfig,
        drafts: Speculation | None,
        images: ImageRegistry,
    ) -> None:
        self._manager, self._images = manager, images
        self._mixed, self._drafts = config.mixed_prefill, drafts
        self.chunk = config.chunked_prefill_size
        self._layout: tuple[int, int, list[int]] = (-1, -1, [])
        self._shared: tuple[Segment, ...] = ()
        self._ones: list[tuple[int]] = []  # (0,), (1,) ...: the rows of a segment that one row reads

    def build(
        self, running: Sequence[Request], released: tuple[int, ...], *, only_free: bool = False
    ) -> tuple[StepPlan, list[Request]]:
        """A plan and the request of each of its rows; no rows if all requests wait. Requests with one token
        to compute are always in; longer stretches share the chunk budget, in the order of `running`. Without
        mixed prefill only prompts are in as long as there are any. `only_free`: without constrained requests
        whose prompts are computed."""
        budget = self.chunk
        alone = not self._mixed and any(request.computed < request.publish_to for request in running)
        rows: list[Row] = []
        private: list[Segment] = []
        requests: list[Request] = []
        leases: list[Lease] = []
        ones, drafts = self._ones, self._drafts
        if len(ones) < len(running):
            ones[:] = [(index,) for index in range(2 * len(running))]
        for request in running:
            start, tokens = request.computed, request.tokens
            guide = request.guide
            if guide is not None and (guide.waits or (only_free and start >= request.publish_to)):
                continue
            if alone and start >= request.publish_to:
                continue
            end = request.goal if request.ending else len(tokens)
            if end - start > 1:
                end = min(end, start + budget)
                budget -= end - start
                if end == start:
                    continue
            lease = request.lease
            assert lease is not None, "a running request holds a lease"
            if written := lease.written():
                private.append(Segment(written, ones[len(rows)], lease.covered))
            step = len(tokens) - request.prompt_len
            if drafts is not None and end == len(tokens) and request.ending is None:
                guesses = drafts.guesses(request) if start >= request.publish_to else ()
                rows.append(_row(request, lease, start, end, guesses, drafts.requested(request)))
            elif (
                request.plain
                and not request.reads_output
                and end == len(tokens) == start + 1
                and (request.images is None or start >= request.prompt_len)
            ):
                slots = lease.take(1)
                token = (tokens[start],)
                params, adapter = request.params, request.adapter
                shift = request.shift
                row = Row(
                    request.seq, token, start, slots, params, True, step, logprob=False, adapter=adapter,
                    shift=shift,
                )  # fmt: skip
                rows.append(row)
            else:
                rows.append(_row(request, lease, start, end))
            requests.append(request)
            leases.append(lease)
        if self._images.active:
            self._images.supply(rows, [request.images for request in requests])
        shared = self._shared_segments([request.seq for request in requests], leases)
        return StepPlan(tuple(rows), (*shared, *private), released), requests

    def _shared_segments(self, seqs: list[int], leases: list[Lease]) -> tuple[Segment, ...]:
        cache, ones = self._manager.cache, self._ones
        layout = (self._manager.moves, cache.version, seqs)
        if layout != self._layout:
            self._layout = layout
            readers: dict[Node, tuple[int, ...] | list[int]] = {}
            for index, lease in enumerate(leases):
                for node in lease.path(cache):
                    known = readers.get(node)
                    if known is None:
                        readers[node] = ones[index]
                    elif type(known) is list:
                        known.append(index)
                    else:
                        readers[node] = [known[0], index]
            self._shared = tuple(
                [Segment(node.runs, tuple(rows), node.start) for node, rows in readers.items()]
            )
        return self._shared


@dataclass(slots=True, eq=False)
class Commit:
    """Applies the results of rows to their requests. `finish`: answers a request that is complete."""

    stage: Stage
    batch: RunningBatch
    guided: GuidedDecoding
    outbox: Outbox
    vocab_size: int
    finish: Callable[[Request], None]

    def row(self, request: Request, row: Row, result: RowResult, now: float) -> None:
        if result.error is not None:
            raise InternalFault(f"the model step failed: {result.error}", where=f"position {row.position}")
        samples = len(result.samples)
        if len(result.scores) != len(row.scores) or not row.sample <= samples <= row.sample + row.drafts:
            raise InternalFault(
                "the step's result lacks what its row asked for", where=f"position {row.position}"
            )
        lease = request.lease
        assert lease is not None
        lease.settle()
        if row.drafts:  # the right ones are taken up again
            lease.rewind(row.drafts)
        request.computed += len(row.tokens) - row.drafts
        void = request.guide is not None and self.guided.settle(request)
        if row.scores and request.logprobs is not None:
            request.logprobs.score(
                request.prompt_len, result.scores, result.score_tops, result.score_token_ids
            )
        if row.hidden != "none":
            request.show(row.position, result.hidden)
        if row.position < request.publish_to:
            self.batch.publish(request)
        if row.sample and not void:
            self.accept(request, result.samples[0], now, at_once=samples > 1)
            if request.drafting is not None:
                self._accept_drafts(request, request.drafting, row, result, now)
        elif row.position < request.prompt_len:
            self.stage.chunk_done(request)
        self.after(request)

    def accept(self, request: Request, sample: Sample, now: float, *, at_once: bool = False) -> None:
        """Append a sampled token. at_once: a constraint follows it now, and not later."""
        size = self.vocab_size
        if not 0 <= sample.token < size:
            raise InternalFault(f"token {sample.token} is not in the vocabulary of {size}", where="sampler")
        if request.timing.first_token_at < 0:
            self.stage.prompt_done(request, sample, now)
        reason = request.ending
        if reason is None:
            free = request.guide is None and request.healing is None
            reason = request.accept(sample) if free else self.guided.accept(request, sample, at_once=at_once)
        if reason is not None:
            request.end(reason)

    def _accept_drafts(
        self, request: Request, drafting: Drafting, row: Row, result: RowResult, now: float
    ) -> None:
        """Append the samples behind its drafts, as if each right draft had been a step: its KV is in the slot
        that would have been next. The rest is dropped once a token has another effect than was guessed (an
        end, forced text)."""
        first = len(row.tokens) - row.drafts
        accepted = 0
        for draft, sample in zip(row.tokens[first:], result.samples[1:]):
            if not _matches(request, row.position + first + accepted, draft):
                break
            accepted += 1
            if request.logprobs is not None:
                request.logprobs.speculated()
            request.take_up()
            self.accept(request, sample, now, at_once=True)
        if row.drafts:
            drafting.verified(row.drafts, accepted)
        drafting.at, drafting.guesses = len(request.tokens), result.guesses

    def after(self, request: Request) -> None:
        """Finish the request if it is complete, else queue an output of a stream."""
        if request.ending is not None and request.ready:
            if self.stage.holds(request):
                self.batch.park(request)
            else:
                self.finish(request)
        elif request.stream:
            self.outbox.add(request, None)


def _matches(request: Request, position: int, draft: int) -> bool:
    """Whether the last sample appended exactly `draft`, and the next token is not determined."""
    guide = request.guide
    return (
        request.ending is None
        and request.computed == position == len(request.tokens) - 1
        and request.tokens[-1] == draft
        and (guide is None or not (guide.pending or guide.unread))
    )


def _row(
    request: Request,
    lease: Lease,
    start: int,
    end: int,
    drafts: tuple[int, ...] = (),
    guesses: int = 0,
) -> Row:
    tokens, logprobs, images = request.tokens, request.logprobs, request.images
    sample = end == len(tokens) and request.ending is None
    media, shift = ((), 0) if images is None else images.spans(start, end)
    return Row(
        request.seq,
        (*request.ids(start, end), *drafts),
        start,
        lease.take(end - start + len(drafts)),
        request.params,
        sample=sample,
        step=len(tokens) - request.prompt_len + (len(tokens) + HEALS if request.healing else 0),
        scores=_scores(request, logprobs, start, end) if logprobs is not None and logprobs.targets else (),
        top_logprobs=logprobs.top if sample and logprobs is not None else 0,
        prompt=request.source.input_ids if request.reads_prompt else (),
        output=tokens[request.prompt_len :] if request.reads_output else (),
        score_top=0 if logprobs is None else logprobs.top,
        token_ids=() if logprobs is None else logprobs.ids,
        hidden="none" if request.hidden == "none" else request.hidden_of(end),
        logprob=logprobs is not None and logprobs.returned,
        start=request.prompt_len,
        adapter=request.adapter,
        masked=sample and (request.guide is not None or request.healing is not None),
        drafts=len(drafts),
        guesses=guesses,
        media=media,
        shift=shift,
    )


def _scores(request: Request, logprobs: Logprobs, start: int, end: int) -> tuple[tuple[int, int], ...]:
    requests = logprobs.requests_of(request.tokens, start, end)
    if request.images is None:
        return requests
    ids = request.images.plain([target for _, target in requests])
    return tuple(zip([index for index, _ in requests], ids))
