"""Batching: running requests -> StepPlan. Takes slots from their leases; decides no admission and frees
nothing."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.cache.base import Node
from runtime.cache.manager import CacheManager, Lease
from runtime.plan import Row, Segment, StepPlan
from runtime.scheduler.request import Request


class Batcher:
    """Builds plans. Between two plans with the same rows and an unchanged cache the shared segments are the
    same, so they are kept: a decode step costs the same however long the contexts are."""

    def __init__(self, manager: CacheManager, chunked_prefill_size: int) -> None:
        self._manager = manager
        self._chunk = chunked_prefill_size
        self._layout: tuple[int, int, list[int]] = (-1, -1, [])
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
        leases = [_lease(request) for request in requests]
        own = [
            Segment(tuple(lease.used), (index,), lease.covered)
            for index, lease in enumerate(leases)
            if lease.used
        ]
        shared = self._shared_segments([request.seq for request in requests], leases)
        return StepPlan(tuple(rows), (*shared, *own), released), requests

    def _shared_segments(self, seqs: list[int], leases: list[Lease]) -> tuple[Segment, ...]:
        cache = self._manager.cache
        layout = (self._manager.moves, cache.version, seqs)
        if layout != self._layout:
            self._layout = layout
            below: dict[int, tuple[Node, int, list[int]]] = {}
            for index, lease in enumerate(leases):
                position = 0
                for node in lease.path(cache):
                    below.setdefault(node.id, (node, position, []))[2].append(index)
                    position += node.length
            self._shared = tuple(
                Segment(node.runs, tuple(rows), position) for node, position, rows in below.values()
            )
        return self._shared


def _lease(request: Request) -> Lease:
    assert request.lease is not None, "a running request holds a lease"
    return request.lease


def _row(request: Request, count: int) -> Row:
    lease = _lease(request)
    start = request.computed
    end = start + count
    tokens = request.tokens
    sample = end == len(tokens) and request.ending is None
    return Row(
        request.seq,
        (tokens[start],) if count == 1 else tuple(tokens[start:end]),
        start,
        lease.take(count),
        request.params,
        sample,
        len(tokens) - request.prompt_len,
        request.wanted(start, end) if request.targets else (),
        request.top if sample else 0,
        request.source.input_ids if request.repetition else (),
        tokens[request.prompt_len :] if request.penalties else (),
    )
