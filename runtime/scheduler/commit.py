"""Commit: what a row's result means to its request. Decides no plan and no place."""

from __future__ import annotations

from collections.abc import Callable

from runtime.plan import Row, RowResult, Sample
from runtime.protocol.errors import InternalFault
from runtime.scheduler.guided.decoding import GuidedDecoding
from runtime.scheduler.requests.drafting import Drafting
from runtime.scheduler.requests.request import Request
from runtime.scheduler.running_batch import RunningBatch
from runtime.scheduler.scheduler_base import Outbox
from runtime.scheduler.stage import Stage


class Commit:
    """`finish`: answers a request that has all that was wanted."""

    def __init__(
        self,
        stage: Stage,
        batch: RunningBatch,
        guided: GuidedDecoding,
        outbox: Outbox,
        vocab_size: int,
        *,
        finish: Callable[[Request], None],
    ) -> None:
        self._stage, self._batch, self._guided, self._outbox = stage, batch, guided, outbox
        self._vocab_size, self._finish = vocab_size, finish

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
        if row.drafts:  # what is right of them is taken up again
            lease.rewind(row.drafts)
        request.computed += len(row.tokens) - row.drafts
        void = request.guide is not None and self._guided.settle(request)
        if row.scores and request.logprobs is not None:
            request.logprobs.score(
                request.prompt_len, result.scores, result.score_tops, result.score_token_ids
            )
        if row.hidden != "none":
            request.show(row.position, result.hidden)
        if row.position < request.publish_to:
            self._batch.publish(request)
        if row.sample and not void:
            self.accept(request, result.samples[0], now, at_once=samples > 1)
            if request.drafting is not None:
                self._drafted(request, request.drafting, row, result, now)
        elif row.position < request.prompt_len:
            self._stage.chunk_done(request)
        self.after(request)

    def accept(self, request: Request, sample: Sample, now: float, *, at_once: bool = False) -> None:
        """Take a sampled token. at_once: what it means to a constraint is not put off."""
        size = self._vocab_size
        if not 0 <= sample.token < size:
            raise InternalFault(f"token {sample.token} is not in the vocabulary of {size}", where="sampler")
        if request.timing.first_token_at < 0:
            self._stage.prompt_done(request, sample, now)
        reason = request.ending
        if reason is None:
            free = request.guide is None and request.heal is None
            reason = request.accept(sample) if free else self._guided.accept(request, sample, at_once=at_once)
        if reason is not None:
            request.end(reason)

    def _drafted(self, request: Request, drafting: Drafting, row: Row, result: RowResult, now: float) -> None:
        """Take what was sampled behind its drafts, as if each that was right had had a step of its own: its
        KV is in the slot that would have been next. Where something else comes of a token than was guessed
        (an end, forced text), the rest is of no use."""
        first = len(row.tokens) - row.drafts
        accepted = 0
        for draft, sample in zip(row.tokens[first:], result.samples[1:]):
            if not _is(request, row.position + first + accepted, draft):
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
        """It has what was to be had: answer it, or tell what is new."""
        if request.ending is not None and request.ready:
            if self._stage.holds(request):
                self._batch.park(request)
            else:
                self._finish(request)
        elif request.stream:
            self._outbox.add(request, None)


def _is(request: Request, place: int, draft: int) -> bool:
    """Whether all that the last sampled token came to is `draft`, at `place`, and the next one is open."""
    guide = request.guide
    return (
        request.ending is None
        and request.computed == place == len(request.tokens) - 1
        and request.tokens[-1] == draft
        and (guide is None or not (guide.pending or guide.unread))
    )
