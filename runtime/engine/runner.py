"""TorchRunner: runs StepPlans with torch. The compute plane's side of runtime/plan.py.

It knows the model, the KV pool and sampling; not requests, grammars or policies.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from runtime.attention.base import Attention, Scoring, choose
from runtime.attention.pool import KVPool, KVShape
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig, World
from runtime.engine import memory
from runtime.engine.adapters import Adapters
from runtime.engine.batch import Batch, parts_of, results_of
from runtime.engine.graphs import Passes
from runtime.engine.kv_memory import pool_memory
from runtime.engine.lookahead import Lookahead, Precomputed, merged, rows_ahead
from runtime.engine.sampling.logprobs import Logits, Scores
from runtime.engine.sampling.rows import RowSampler, sampler_on, with_draft_rows
from runtime.engine.sampling.sampler import Then, Unsampled
from runtime.kernels.device import compiled, current
from runtime.layers.lora.linear import Adapted
from runtime.models.decoder import Decoder
from runtime.models.vision.store import ImageStore
from runtime.parallel import ALONE, Group
from runtime.plan import Adapter, Image, Row, RowResult, Run, Segment, StepPlan, StepResult, TokenMask
from runtime.protocol.control import MemoryPart, no_adapters
from runtime.protocol.errors import BadRequest, DeadlineExceeded, InternalFault, RuntimeFault
from runtime.protocol.sampling import SamplingParams

_CLOSE_WAIT_S = 30.0
PATIENCE = 0.8
"""The share of step_timeout_s that a rank waits for the others. Waiting ranks report before the time is up; a
rank that reports nothing is the stuck one."""
WARM_UP_TOKENS = (16, 32, 64, 256, 512, 1024)
"""Numbers of tokens in a pass for which products of few rows and of experts have kernels of their own."""
log = logging.getLogger(__name__)


# Waking a thread and waiting for it costs an operation about ten microseconds, as much as a whole small
# product: small passes are computed by one thread, which leaves the other cores to other processes.
SHARED = 8_000_000
"""A layer uses several threads if its widest product has at least this many multiplications. Measured with
two threads: at 4 million one thread is 25 % faster, at 6 million two are 10 % faster, at 29 million 40 %."""


@dataclass(slots=True)
class Threads:
    """most: torch's default. width: elements of the widest matrix of a layer."""

    most: int
    width: int
    now: int

    @classmethod
    def of(cls, decoder: Decoder) -> Threads | None:
        """None if there is nothing to choose."""
        most, spec, shard = torch.get_num_threads(), decoder.spec, decoder.shard
        if decoder.device.type != "cpu" or most == 1:
            return None
        widest = max(len(shard.ffn(spec)), len(shard.heads(spec)) * spec.head_dim)
        return cls(most, spec.hidden_size * widest, most)

    def use_for(self, tokens: int) -> None:
        """Set the number of threads for a pass of `tokens` tokens. Called by the thread that computes."""
        count = self.most if tokens * self.width >= SHARED else 1
        if count != self.now:
            torch.set_num_threads(count)
            self.now = count


class Ended(Future[Any]):
    """A completed call. It has none of a Future's locks, which would cost more than reading the result."""

    def __init__(self, result: Any, error: Exception | None) -> None:
        self._ended = (result, error)

    def result(self, timeout: float | None = None) -> Any:
        result, error = self._ended
        if error is not None:
            raise error
        return result

    def done(self) -> bool:
        return True


class Here(Executor):
    """Runs functions at once, in the caller's thread."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        try:
            return Ended(fn(*args, **kwargs), None)
        except Exception as error:  # noqa: BLE001 - raised again by result()
            return Ended(None, error)


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """Hidden states of the sampled rows [sampled, hidden_size], after their drafts [drafts, hidden_size] and
    those that the plan asked for, with the scores. expanded: the sampled rows, followed by a row for each
    draft. logits: of these; None if masks will follow. hidden_s: seconds until the hidden states were
    there."""

    last: Tensor
    logits: Logits | None
    scores: Scores
    states: Tensor
    drafts: Tensor
    expanded: list[Row]
    hidden_s: float
    seconds: float


MakeAttention: TypeAlias = Callable[[int, Scoring], Attention[KVPool]]
"""Creates an attention from the number of slots and the scoring."""


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    """computed: on a GPU, set when the queued pass has finished."""

    batch: Batch
    future: Future[_Forward]
    computed: torch.cuda.Event | None

    def done(self) -> bool:
        return self.future.done() and (self.computed is None or self.computed.query())


class TorchRunner:
    """Implements runtime.plan.Runner. launch() hands the forward pass to a thread, in which torch releases
    the GIL, so that the caller can fill masks meanwhile. With `beside` False launch() runs it itself, for a
    caller in a process of its own.

    The ranks of a group get the same plans and masks, in the same order. All compute all logits; only rank 0
    samples, and the others return no results.
    """

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention[KVPool],
        config: RunnerConfig,
        *,
        beside: bool = True,
        kv_file: int | None = None,
        group: Group = ALONE,
        adapters: Adapters | None = None,
        again: MakeAttention | None = None,
        ahead: int = 0,
    ) -> None:
        """kv_file: the file of the pool, if any; the caller closes it. adapters: of the decoder's matrices;
        None: not supported. again: creates another `attention`; None: it cannot be replaced. ahead: slots of
        the pool reserved for the rows of a step that is queued before its plan."""
        spec, shard = decoder.spec, decoder.shard
        self._memory_of = partial(
            pool_memory, file=kv_file, first=shard.kv_heads(spec).start, total_heads=spec.num_kv_heads
        )
        self.kv_memory = self._memory_of(attention.pool)
        self.slots, self._spare, self._again = attention.pool.slots - ahead, ahead, again
        self._decoder, self._attention, self._config, self._group = decoder, attention, config, group
        self.device, self.vocab_size = decoder.device.type, spec.vocab_size
        self._worker: Executor = (
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward") if beside else Here()
        )
        self._pending: _Pending | None = None
        self._adapters = adapters
        self._images = None if decoder.tower is None else ImageStore(decoder.tower)
        self._passes = Passes(decoder, attention, adapters, self._images)
        positions = spec.max_position_embeddings if spec.learned_positions else sys.maxsize
        self._lookahead = Lookahead(self._passes, self.slots, ahead, positions) if ahead else None
        self._threads = None if beside or config.threads is not None else Threads.of(decoder)
        sampler = sampler_on(decoder.device) if group.rank == 0 else Unsampled()
        self._rows = RowSampler(
            decoder,
            sampler,
            spec.vocab_size,
            config.seed,
            scaled=config.scaled_logprobs,
            lists=not compiled(decoder.device),
        )

    @classmethod
    def load(
        cls,
        path: str | Path,
        spec: ModelSpec,
        config: RunnerConfig | None = None,
        *,
        beside: bool = True,
        kv_file: int | None = None,
        world: World | None = None,
        group: Group | None = None,
    ) -> TorchRunner:
        """Read the checkpoint in `path` and create its KV pool, in `kv_file` if given; only the part of the
        rank in `world`. group: the rank's, if it has joined already. Raises ModelLoadError; EngineDead if
        another rank is gone."""
        config = (config or RunnerConfig()).verify()
        world = world or World()
        ranks = world.size
        if config.tp_size != ranks:
            raise InternalFault(f"tp_size is {config.tp_size}, there are {ranks} ranks", where="runner")
        directory = Path(os.path.expanduser(path))
        if kv_file is None and config.shared_kv:
            kv_file = os.memfd_create("kv")  # stays open: peers may ask for it at any time
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        elif ranks > 1:  # they share the cores
            torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
        device = memory.pick_device(config.device, world.rank, ranks)
        dtype = memory.pick_dtype(config.dtype, device)
        group = group or Group.join(world.rank, ranks, world.file, device, world.timeout_s)
        with torch.inference_mode(), current(device):
            method = memory.linear_method(spec, config, dtype, device, str(directory))
            dummy = config.load_format == "dummy"
            decoder = Decoder.load(directory, spec, dtype, device, method, group, dummy=dummy)
            adapters = None if not isinstance(method, Adapted) else Adapters.of(method, config)
            group.least(0)  # all have their weights: the free memory is for the pools
            kv_heads = len(decoder.shard.kv_heads(spec))
            kept = memory.kv_dtype(config.kv_cache_dtype, dtype)
            shape = KVShape(spec.num_layers, kv_heads, spec.head_dim, kept, device, kv_file)
            kind = choose(config.attention, device, spec.head_dim)
            slots = memory.slots_for(
                kind.bytes_per_slot(shape),
                device,
                config.max_total_tokens,
                config.memory_fraction,
                str(directory),
                ranks,
            )
            slots = group.least(slots)
            heads = len(decoder.shard.heads(spec))

            def again(slots: int, scoring: Scoring) -> Attention[KVPool]:
                return kind(shape, slots, heads, spec.windows, scoring)

            ahead = rows_ahead(config, device, ranks)
            attention = again(slots + ahead, decoder.scoring)
            runner = cls(
                decoder, attention, config, beside=beside, kv_file=kv_file, group=group, adapters=adapters,
                again=again, ahead=ahead,
            )  # fmt: skip
            if runner._threads is not None:
                runner._threads.use_for(1)  # as in the small passes for which the choice matters
            method.tune()
            if compiled(device) and min(slots, spec.max_position_embeddings) > 1:
                runner._warm_up()
            if group.size == 1:
                runner._passes.record(config.cuda_graph_max_bs if config.cuda_graph else 0)
            group.least(0)
        group.limit(PATIENCE * config.step_timeout_s)
        return runner

    def _warm_up(self) -> None:
        """Compile kernels and initialise libraries before the first request: run prompts of the sizes that
        have different kernels, and one more token."""
        begin = time.perf_counter()
        sampling, positions = SamplingParams(temperature=0.0), self._decoder.spec.max_position_embeddings
        most = min(self.slots, positions, 2048) - 1
        sizes = [size for size in WARM_UP_TOKENS if size < most]
        rows = [Row(0, (0,) * size, 0, (Run(0, size),), sampling) for size in [*sizes, most]]
        plans = [StepPlan((row,), ()) for row in rows]
        last = Row(0, (0,), most, (Run(most, 1),), sampling)
        for plan in (*plans, StepPlan((last,), (Segment((Run(0, most),), (0,), 0),))):
            self.launch(plan)
            self.finish({})
        log.info("compiled kernels in %.1f s", time.perf_counter() - begin)

    def verify(self, params: SamplingParams) -> None:
        """Raise BadRequest if a logit processor is unknown or cannot use its parameters."""
        if params.custom_logit_processor is not None or params.custom_params:
            self._rows.sampler.processors.verify(params, self.vocab_size)

    def launch(self, plan: StepPlan) -> None:
        """Start the forward pass. Raises InternalFault, and runs nothing, if the plan is invalid."""
        if self._pending is not None:
            raise InternalFault("launch() before finish() of the step before", where="runner")
        self._rows.release(plan.released)
        device = self._decoder.device
        computed = torch.cuda.Event() if device.type == "cuda" else None
        with torch.inference_mode(), current(device):
            batch = self._batch(plan)
            precomputed = None
            if self._lookahead is not None:
                precomputed = self._lookahead.take(plan, self._attention.pool)
        self._pending = _Pending(
            batch, self._worker.submit(self._forward, batch, precomputed, computed), computed
        )

    def _batch(self, plan: StepPlan) -> Batch:
        device, adapters = self._decoder.device, self._adapters or ()
        return Batch.of(plan, self.vocab_size, self.slots, device, adapters, self._images)

    def done(self) -> bool:
        return self._pending is None or self._pending.done()

    def finish(self, masks: Mapping[int, TokenMask]) -> StepResult:
        """Raises DeadlineExceeded if the pass takes longer than step_timeout_s, InternalFault if it
        failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise InternalFault("finish() without launch()", where="runner")
        limit = self._config.step_timeout_s
        try:
            forward = pending.future.result(timeout=limit)
        except FutureTimeout as error:
            raise DeadlineExceeded(
                f"a forward pass did not end within {limit:g} s", where="runner"
            ) from error
        except RuntimeFault:
            raise
        except Exception as error:
            raise InternalFault(
                f"the forward pass failed: {type(error).__name__}: {error}", where="runner"
            ) from error
        begin = time.perf_counter()
        with torch.inference_mode(), current(self._decoder.device):
            rows = self._results(pending.batch, forward, masks)
            if self._lookahead is not None:
                self._lookahead.drew(rows)
        return StepResult(rows, forward.seconds + time.perf_counter() - begin, forward.hidden_s)

    def load_adapter(self, adapter: Adapter) -> None:
        """Between two passes: waits for a running one."""
        if self._adapters is None:
            raise no_adapters("lora_path")
        self._worker.submit(self._adapters.load, adapter).result()

    def unload_adapter(self, number: int) -> None:
        if self._adapters is not None:
            self._worker.submit(self._adapters.unload, number).result()

    def load_images(self, images: Sequence[Image]) -> None:
        if self._images is None:
            raise BadRequest("the model takes no pictures", where="image_data")
        self._images.load(images)

    def drop_images(self, numbers: Sequence[int]) -> None:
        if self._images is not None:
            self._images.drop(numbers)

    def update_weights(self, path: str) -> None:
        """Both models are in memory for a moment. If it raises, all ranks keep the old one."""
        if self._adapters is not None:
            raise BadRequest("weights cannot be changed where LoRA adapters are taken", where="enable_lora")
        decoder = self._worker.submit(
            memory.read_again, Path(path), self._decoder, self._config, self._group
        ).result()
        self._use(decoder, self._attention)

    def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """A pool of one slot and a decoder without layers stay as placeholders."""
        if "weights" in parts and self._adapters is not None:
            raise BadRequest("weights stay where LoRA adapters are taken", where="tags")
        decoder, attention = self._decoder, self._attention
        if "weights" in parts:
            decoder = decoder.without_weights()
        if "kv_cache" in parts:
            attention = self._attention_of(1)
        self._use(decoder, attention)
        del decoder, attention
        self._worker.submit(memory.give_back, self._decoder.device).result()

    def restore_memory(self, parts: Sequence[MemoryPart], path: str) -> None:
        if "weights" in parts and self._decoder.is_empty:
            self.update_weights(path)
        if "kv_cache" in parts and self._attention.pool.slots < self.slots:
            self._use(self._decoder, self._attention_of(self.slots + self._spare))
        self._worker.submit(
            memory.give_back, self._decoder.device
        ).result()  # temporary memory of reading weights

    def _attention_of(self, slots: int) -> Attention[KVPool]:
        if self._again is None:
            raise InternalFault("the KV pool was not made here", where="runner")
        with torch.inference_mode(), current(self._decoder.device):
            return self._again(slots, self._decoder.scoring)

    def _use(self, decoder: Decoder, attention: Attention[KVPool]) -> None:
        whole = attention.pool.slots >= self.slots and not decoder.is_empty
        if self._lookahead is not None:
            self._lookahead.forget()
        self._worker.submit(self._passes.use, decoder, attention, record=whole).result()
        self._decoder = self._rows.head = decoder
        if attention is not self._attention:
            self._attention, self.kv_memory = attention, self._memory_of(attention.pool)

    def close(self) -> None:
        """Wait for a running pass, within a limit, and end the thread."""
        pending, self._pending = self._pending, None
        running = None
        if pending is not None and not (pending.future.done() or pending.future.cancel()):
            running = pending.future
        stuck = running is not None and bool(wait([running], _CLOSE_WAIT_S).not_done)
        if stuck:
            log.warning("a forward pass did not end within %g s and is left behind", _CLOSE_WAIT_S)
        self._worker.shutdown(wait=not stuck, cancel_futures=True)

    def _forward(
        self, batch: Batch, precomputed: Precomputed | None, computed: torch.cuda.Event | None
    ) -> _Forward:
        begin = time.perf_counter()
        if self._threads is not None:
            self._threads.use_for(len(batch.ids))
        decoder, count = self._decoder, len(batch.sampled)
        with torch.inference_mode(), current(decoder.device):
            hidden = self._hidden(batch, precomputed)
            hidden_s = time.perf_counter() - begin
            rows = [batch.plan.rows[index] for index in batch.sampled]
            scaled = self._config.scaled_logprobs
            last, scores, states, drafts = parts_of(batch, hidden, decoder.logits, self.vocab_size, scaled)
            expanded = with_draft_rows(rows) if len(drafts) else rows
            later = any(row.masked for row in rows) or len(expanded) > max(self._rows.most, count)
            whole = torch.cat((last, drafts)) if len(drafts) and not later else last
            logits = None if later else self._rows.logits(whole, expanded)
            if computed is not None:
                computed.record()
            seconds = time.perf_counter() - begin
            return _Forward(last, logits, scores, states, drafts, expanded, hidden_s, seconds)

    def _hidden(self, batch: Batch, precomputed: Precomputed | None) -> Tensor:
        """The hidden states for the batch's output_indices. precomputed: the part that was computed ahead."""
        if precomputed is None:
            return self._passes.hidden(batch)
        rest = None if precomputed.rest is None else self._batch(precomputed.rest[0])
        return merged(precomputed, batch, rest, None if rest is None else self._passes.hidden(rest))

    def _results(
        self, batch: Batch, forward: _Forward, masks: Mapping[int, TokenMask]
    ) -> tuple[RowResult, ...]:
        mine = {index: masks[plan_row] for index, plan_row in enumerate(batch.sampled) if plan_row in masks}
        outputs = (forward.last, forward.drafts, forward.expanded, forward.logits)
        sampled = self._rows.sampled(*outputs, mine, self._then(batch))
        return () if self._group.rank else results_of(batch, sampled, forward.scores, forward.states)

    def _then(self, batch: Batch) -> Then | None:
        """The function that queues the next step after the draws of a decoding batch; None for other
        batches."""
        if self._lookahead is None or batch.output_indices is not None or len(batch.ids) > self._rows.most:
            return None
        return partial(self._lookahead.queue, batch)
