"""Graphs: decoding steps recorded once as CUDA graphs and repeated, so that a step of hundreds of kernels
costs the host one launch.

A recorded step has a fixed number of rows, of one token each; a batch uses the next larger one. Its inputs
and attention's tables lie at fixed places, which are filled before it is repeated; rows that are too many
write nothing. What is no such batch (prompts, drafts, adapters), or has tables that do not fit, is computed
as it is.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
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
"""Runs what it is given, and records it: its result, and what repeats it, into the same result."""


class _Step(NamedTuple):
    fixed: FixedStep
    out: Tensor
    again: Callable[[], object]


class Graphs:
    """sizes: numbers of rows. Raises RuntimeError for a pass that cannot be recorded."""

    def __init__(
        self, decoder: Decoder, attention: Attention[KVPool], sizes: Sequence[int], record: Recorder
    ) -> None:
        self._sizes: list[int] = []
        self._steps: dict[int, _Step] = {}
        most, device = max(sizes, default=0), decoder.device
        self._ids = torch.zeros(most, dtype=torch.int64, device=device)
        self._positions = torch.zeros(most, dtype=torch.int64, device=device)
        begin = time.perf_counter()
        for size in sorted(sizes, reverse=True):  # the largest first: the others fit into its memory
            fixed = attention.fixed(size)
            if fixed is None:
                return
            ids, positions = self._ids[:size], self._positions[:size]

            def run(ids: Tensor = ids, positions: Tensor = positions, fixed: FixedStep = fixed) -> Tensor:
                return decoder.hidden(ids, positions, fixed.step)

            self._steps[size] = _Step(fixed, *record(run))
        self._sizes = sorted(self._steps)
        if self._sizes:
            log.info(
                "recorded decoding steps of %s rows in %.1f s",
                ", ".join(map(str, self._sizes)),
                time.perf_counter() - begin,
            )

    def hidden(self, batch: Batch) -> Tensor | None:
        """As Decoder.hidden of the batch and what it wants; None: it is not for a recorded step."""
        made = self.step(batch.plan, batch.ids, batch.positions)
        return made if made is None or batch.wanted is None else made[batch.wanted]

    def step(self, plan: StepPlan, ids: Tensor, positions: Tensor) -> Tensor | None:
        """Of a plan of rows of one token, ids, positions [rows]: the hidden states of all."""
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
    """All that it records shares one pool of memory: what it recorded runs one at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._pool = device, None

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], object]]:
        aside = torch.cuda.Stream(self._device)
        aside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(aside):  # what libraries and kernels do the first time is not recorded
            run()
        torch.cuda.current_stream(self._device).wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        self._pool = graph.pool()
        return out, graph.replay


class Passes:
    """A runner's forward passes: recorded ones where that was asked for and a batch is for them."""

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
        """Others of the same shape; steps are recorded anew. record: False: nothing is computed with them."""
        self._decoder, self._attention, self._graphs = decoder, attention, None
        if self._images is not None and decoder.tower is not None:
            self._images.use(decoder.tower)
        if record:
            self.record(self._most)

    def record(self, most: int, record: Recorder | None = None) -> None:
        """Steps of up to `most` rows without adapters; none where there is no GPU, or where the model's pass
        asks the device for numbers. record: CUDA's without."""
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
        """The final hidden states that the batch wants."""
        adapted = self._adapters is not None and self._adapters.use(batch.plan.rows)
        given = self._given(batch)
        known = None if adapted or given is not None else self._graphs
        recorded = None if known is None else known.hidden(batch)
        if recorded is not None:
            return recorded
        step = self._attention.begin(batch.plan)
        if adapted:  # in all layers the same tokens, each with its adapter
            made = self._decoder.hidden(batch.ids, batch.positions, step, embedded=given)
            return made if batch.wanted is None else made[batch.wanted]
        return self._decoder.hidden(batch.ids, batch.positions, step, batch.wanted, given)

    def recorded(self, plan: StepPlan, ids: Tensor, positions: Tensor) -> Tensor | None:
        """The hidden states [rows, hidden_size] of a plan of rows of one token, none with an adapter or a
        picture; None: they are not for a recorded step."""
        return None if self._graphs is None else self._graphs.step(plan, ids, positions)

    def _given(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Embeddings of tokens that stand for parts of pictures."""
        if batch.media is None or self._images is None:
            return None
        which, spans = batch.media
        return which, self._images.features(spans)
