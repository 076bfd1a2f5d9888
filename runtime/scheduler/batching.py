"""Batching: running requests -> StepPlan. Takes slots from their leases; decides no admission and frees
nothing. It runs for every token of every request: hence the loops written out.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.cache.manager import CacheManager, Lease
from runtime.cache.node import Node
from runtime.config.scheduler import SchedulerConfig
from runtime.plan import Row, Segment, StepPlan
from runtime.scheduler.requests.components import Logprobs
from runtime.scheduler.requests.images import ImageRegistry
from runtime.scheduler.requests.request import Request
from runtime.scheduler.speculation import Speculation

HEALS = 1 << 62
"""Draws that choose the end of a prompt are other ones than those of the output."""


class Flight:
    """A plan that was given and not committed: its rows, and the request of each. present: how many requests
    ran, in it or not."""

    __slots__ = ("_seqs", "present", "requests", "rows")

    def __init__(self, requests: list[Request], rows: tuple[Row, ...], present: int = 0) -> None:
        self.requests, self.rows, self.present = requests, rows, present
        self._seqs: set[int] | None = None

    @property
    def seqs(self) -> set[int]:
        """Handles of its sequences."""
        if self._seqs is None:
            self._seqs = {request.seq for request in self.requests}
        return self._seqs


NO_FLIGHT = Flight([], ())


class Batcher:
    """Builds plans. Between two plans with the same rows and an unchanged cache the shared segments are the
    same, so they are kept: a decode step costs the same however long the contexts are.

    `chunk`: tokens of prompts (and of forced text) in one plan. `drafts`: what guesses tokens. `images`: has
    the pictures supplied that a plan names.
    """

    def __init__(
        self, manager: CacheManager, config: SchedulerConfig, drafts: Speculation, images: ImageRegistry
    ) -> None:
        self._manager, self._images = manager, images
        self._mixed, self._drafts = config.mixed_prefill, drafts if drafts.active else None
        self.chunk = config.chunked_prefill_size
        self._layout: tuple[int, int, list[int]] = (-1, -1, [])
        self._shared: tuple[Segment, ...] = ()
        self._ones: list[tuple[int]] = []  # (0,), (1,) ...: the rows of a segment that one row reads

    def build(
        self, running: Sequence[Request], released: tuple[int, ...], *, only_free: bool = False
    ) -> tuple[StepPlan, list[Request]]:
        """A plan and the request of each of its rows. Requests with one token to compute are always in;
        longer stretches share the chunk budget, in the order of `running`. Where prompts go alone, only they
        are in as long as there are any. No rows at all where everybody waits. `only_free`: without
        constrained requests whose prompts are computed."""
        budget = self.chunk
        alone = not self._mixed and any(request.computed < request.publish_to for request in running)
        rows: list[Row] = []
        own: list[Segment] = []
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
                own.append(Segment(written, ones[len(rows)], lease.covered))
            step = len(tokens) - request.prompt_len
            if drafts is not None and end == len(tokens) and request.ending is None:
                guesses = drafts.guesses(request) if start >= request.publish_to else ()
                rows.append(_row(request, lease, start, end, guesses, drafts.wanted(request)))
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
        self._images.supply(rows, [request.images for request in requests])
        shared = self._shared_segments([request.seq for request in requests], leases)
        return StepPlan(tuple(rows), (*shared, *own), released), requests

    def _shared_segments(self, seqs: list[int], leases: list[Lease]) -> tuple[Segment, ...]:
        cache, ones = self._manager.cache, self._ones
        layout = (self._manager.moves, cache.version, seqs)
        if layout != self._layout:
            self._layout = layout
            readers: dict[Node, tuple[int, ...] | list[int]] = {}
            for index, lease in enumerate(leases):
                for node in lease.path(cache):
                    found = readers.get(node)
                    if found is None:
                        readers[node] = ones[index]
                    elif type(found) is list:
                        found.append(index)
                    else:
                        readers[node] = [found[0], index]
            self._shared = tuple(
                [Segment(node.runs, tuple(rows), node.start) for node, rows in readers.items()]
            )
        return self._shared


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
        step=len(tokens) - request.prompt_len + (len(tokens) + HEALS if request.heal else 0),
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
        masked=sample and (request.guide is not None or request.heal is not None),
        drafts=len(drafts),
        guesses=guesses,
        media=media,
        shift=shift,
    )


def _scores(request: Request, logprobs: Logprobs, start: int, end: int) -> tuple[tuple[int, int], ...]:
    wanted = logprobs.wanted(request.tokens, start, end)
    if request.images is None:
        return wanted
    ids = request.images.plain([target for _, target in wanted])
    return tuple(zip([place for place, _ in wanted], ids))
