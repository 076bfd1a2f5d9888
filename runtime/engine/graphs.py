"""Graphs: decoding steps recorded once as CUDA graphs and replayed, so that a step of hundreds of kernels
costs the host one launch.

A recorded step has a fixed number of rows of one token each; a batch uses the next larger one, whose surplus
rows write nothing. Other batches, and those whose tables do not fit, are computed without a graph.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from runtime.attention.base import Attention, FixedStep
from runtime.attention.pool import KVPool
from runtime.engine.adapters import Adapters
from runtime.engine.batch import Batch
from runtime.models.decoder import Decoder
from runtime.models.vision.store import ImageStore
from runtime.plan import StepPlan

log = logging.getLogger(__name__)

Recorder: TypeAlias = Callable[[Callable[[], Tensor]], tuple[Tensor, Callable[[], object]]]
"""Runs and records a function. Returns its result, and a function that replays it into the same result."""


class _Step(NamedTuple):
    fixed: FixedStep
    out: Tensor
    again: Callable[[], object]


class Graphs:
    """sizes: numbers of rows. Raises RuntimeError if a pass cannot be recorded."""

    def __init__(
        self, decoder: Decoder, attention: Attention[KVPool], sizes: Sequence[int], record: Recorder
    ) -> None:
        self._sizes: list[int] = []
        self._steps: dict[int, _Step] = {}
        most, device = max(sizes, default=0), decoder.device
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        begin = time.perf_counter()
        for size in sorted(sizes, reverse=True):  # largest first: the others reuse its memory
            fixed = attention.fixed(size)
            if fixed is None:
                return
            ids, positions = self._ids[:size], self._positions[:size]
            self._steps[size] = _Step(fixed, *record(partial(decoder.hidden, ids, positions, fixed.step)))
        self._sizes = sorted(self._steps)
        if self._sizes:
            log.info(
                "recorded decoding steps of %s rows in %.1f s",
                ", ".join(map(str, self._sizes)),
                time.perf_counter() - begin,
            )

    def hidden(self, batch: Batch) -> Tensor | None:
        """Decoder.hidden() of the batch, for its output_indices; None if no recorded step fits."""
        hidden = self.step(batch.plan, batch.ids, batch.positions)
        return hidden if hidden is None or batch.output_indices is None else hidden[batch.output_indices]

    def step(self, plan: StepPlan, ids: Tensor, positions: Tensor) -> Tensor | None:
        """The hidden states of all rows, for a plan with rows of one token; ids and positions [rows]. None if
        no recorded step fits."""
        rows = len(plan.rows)
        if not self._sizes or rows > self._sizes[-1] or len(ids) != rows:
            return None
        step = self._steps[self._sizes[bisect_left(self._sizes, rows)]]
        if not step.fixed.load(plan):
            return None
        self._ids[:rows].copy_(ids)
        self._positions[:rows].copy_(positions)
        step.again()
        return step.out[:rows].clone()


def sizes_up_to(most: int) -> list[int]:
    """1, 2, 4, 8, then every 8 up to 128, then every 16, and `most`."""
    sizes = {1, 2, 4, *range(8, 129, 8), *range(144, most + 1, 16), most}
    return sorted(size for size in sizes if 0 < size <= most)


class CudaRecorder:
    """All recordings share one memory pool: they run one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, None

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):  # one-time work of libraries and kernels is not recorded
            run()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        self._pool = graph.pool()
        return out, graph.replay


class Passes:
    """A runner's forward passes, recorded ones if enabled and suitable."""

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention[KVPool],
        adapters: Adapters | None = None,
        images: ImageStore | None = None,
    ) -> None:
        self._decoder, self._attention, self._adapters = decoder, attention, adapters
        self._images = images
        self._graphs: Graphs | None = None
        self._most = 0

    def use(self, decoder: Decoder, attention: Attention[KVPool], *, record: bool = True) -> None:
        """Use another decoder and attention of the same shape; steps are recorded again. record: False if
        they will compute nothing."""
        self._decoder, self._attention, self._graphs = decoder, attention, None
        if self._images is not None and decoder.tower is not None:
            self._images.use(decoder.tower)
        if record:
            self.record(self._most)

    def record(self, most: int, record: Recorder | None = None) -> None:
        """Record steps of up to `most` rows without adapters. None are recorded without a GPU, or if the
        model's pass reads numbers back from the device. record: CUDA's by default."""
        self._most, device = most, self._decoder.device
        if most < 1 or (record is None and device.type != "cuda"):
            return
        try:
            self._graphs = Graphs(
                self._decoder, self._attention, sizes_up_to(most), record or CudaRecorder(device)
            )
        except RuntimeError as error:
            log.warning("decoding steps are not recorded: %s", error)

    def hidden(self, batch: Batch) -> Tensor:
        """The final hidden states for the batch's output_indices."""
        adapted = self._adapters is not None and self._adapters.use(batch.plan.rows)
        embedded = self._embedded(batch)
        known = None if adapted or embedded is not None else self._graphs
        recorded = None if known is None else known.hidden(batch)
        if recorded is not None:
            return recorded
        step = self._attention.begin(batch.plan)
        if adapted:  # all layers must see all tokens, each with its adapter
            hidden = self._decoder.hidden(batch.ids, batch.positions, step, embedded=embedded)
            return hidden if batch.output_indices is None else hidden[batch.output_indices]
        return self._decoder.hidden(batch.ids, batch.positions, step, batch.output_indices, embedded)

    def recorded(self, plan: StepPlan, ids: Tensor, positions: Tensor) -> Tensor | None:
        """The hidden states [rows, hidden_size] of a plan with rows of one token, without adapters and
        images. None if no recorded step fits."""
        return None if self._graphs is None else self._graphs.step(plan, ids, positions)

    def _embedded(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """The indices of tokens that stand for parts of images, and their embeddings."""
        if batch.media is None or self._images is None:
            return None
        which, spans = batch.media
        return which, self._images.features(spans)
