"""Batching: running requests -> StepPlan. Takes slots from their leases; decides no admission and frees
nothing."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.cache.base import Node
from runtime.cache.manager import CacheManager
from runtime.plan import Row, Segment, StepPlan
from runtime.scheduler.request import Request


class Batcher:
    """Builds plans. Between two plans with the same rows and an unchanged cache the shared segments are the
    same, so they are kept: a decode step costs the same however long the contexts are."""

    def __init__(self, manager: CacheManager, chunked_prefill_size: int) -> None:
        self._manager = manager
        self._chunk = chunked_prefill_size
        self._layout: tuple[object, ...] = ()
        self._shared: tuple[Segment, ...] = ()

    def build(self, running: Sequence[Request], released: tuple[int, ...]) -> tuple[StepPlan, list[Request]]:
        """A plan and the request of each of its rows. Requests with one token to compute are always in;
        longer stretches share the chunk budget, in the order of `running`."""
        budget = self._chunk
        rows: list[Row] = []
        requests: list[Request] = []
        for request in running:
            count = request.until - request.computed
            if count > 1:
                count = min(count, budget)
                budget -= count
                if not count:
                    continue
            rows.append(_row(request, count))
            requests.append(request)
        segments = self._shared_segments(requests)
        own = [
            Segment(tuple(lease.used), (index,), lease.covered)
            for index, request in enumerate(requests)
            if (lease := request.lease) is not None and lease.used
        ]
        return StepPlan(tuple(rows), (*segments, *own), released), requests

    def _shared_segments(self, requests: Sequence[Request]) -> tuple[Segment, ...]:
        cache = self._manager.cache
        layout = (
            cache.version,
            *[(request.seq, request.lease and request.lease.covered) for request in requests],
        )
        if layout != self._layout:
            self._layout = layout
            below: dict[int, tuple[Node, int, list[int]]] = {}
            for index, request in enumerate(requests):
                position = 0
                for node in request.lease.path(cache) if request.lease else ():
                    below.setdefault(node.id, (node, position, []))[2].append(index)
                    position += node.length
            self._shared = tuple(
                Segment(node.runs, tuple(rows), position) for node, position, rows in below.values()
            )
        return self._shared


def _row(request: Request, count: int) -> Row:
    lease = request.lease
    assert lease is not None
    start = request.computed
    end = start + count
    tokens = request.tokens
    sample = end == len(tokens) and request.ending is None
    params = request.params
    repetition = params.repetition_penalty != 1.0
    penalties = repetition or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    return Row(
        request.seq,
        (tokens[start],) if count == 1 else tuple(tokens[start:end]),
        start,
        lease.take(count),
        params,
        sample,
        request.produced,
        request.wanted(start, end),
        request.source.top_logprobs_num if sample and request.source.return_logprob else 0,
        request.source.input_ids if repetition else (),
        tokens[request.prompt_len :] if penalties else (),
    )
