"""TorchRunner: runs StepPlans with torch. The model wing's side of runtime/plan.py.

It knows the model, the KV pool and sampling; not requests, grammars or policies.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from runtime.attention.base import Attention, choose
from runtime.attention.pool import KVPool
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine import memory
from runtime.engine.batch import Batch
from runtime.engine.logprobs import finite, scores_of, top_of
from runtime.engine.sampler import sample, uniform
from runtime.layers.linear import can_pack
from runtime.models.decoder import Decoder
from runtime.plan import Row, RowResult, Run, StepPlan, StepResult, TokenMask
from runtime.protocol.errors import DeadlineExceeded, InternalFault, ModelLoadError, RuntimeFault

NOT_FINITE = "the model's numbers are not finite"
NOTHING_ALLOWED = "the mask allows no token"
_CLOSE_WAIT_S = 30.0


@dataclass(frozen=True, slots=True, eq=False)
class _Forward:
    """What the forward pass leaves for sampling: logits [sampled, vocab] float32, their log-sum-exp, which
    rows are finite, and the scores that the plan asked for."""

    logits: Tensor
    total: Tensor
    finite: Tensor
    scores: Tensor
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _Pending:
    batch: Batch
    future: Future[_Forward]


class TorchRunner:
    """Implements runtime.plan.Runner. launch() hands the forward pass to a thread of its own, in which torch
    lets go of the interpreter, so that the caller can fill masks meanwhile."""

    def __init__(self, decoder: Decoder, attention: Attention, config: RunnerConfig) -> None:
        self._decoder, self._attention, self._config = decoder, attention, config
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")
        self._pending: _Pending | None = None
        self._random = random.Random(config.seed)
        self._seeds: dict[int, int] = {}  # of live sequences that gave none

    @classmethod
    def load(cls, path: str | Path, spec: ModelSpec, config: RunnerConfig | None = None) -> TorchRunner:
        """Read the checkpoint in `path` and make its KV pool. Raises ModelLoadError."""
        config = (config or RunnerConfig()).verify()
        directory = Path(path).expanduser()
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        device = _device(config.device)
        dtype = _dtype(config.dtype, device, spec)
        memory.check_weights_fit(spec, dtype, device, str(directory))
        with torch.inference_mode():
            decoder = Decoder.load(directory, spec, dtype, device, pack=_packs(config, spec, dtype, device))
            slots = memory.slots_for(
                spec, dtype, device, config.max_total_tokens, config.memory_fraction, str(directory)
            )
            pool = KVPool(spec.num_layers, spec.num_kv_heads, slots, spec.head_dim, dtype, device)
            attention = choose(config.attention, device)(pool, spec.num_heads, spec.windows)
        return cls(decoder, attention, config)

    @property
    def slots(self) -> int:
        return self._attention.pool.slots

    @property
    def vocab_size(self) -> int:
        return self._decoder.spec.vocab_size

    def launch(self, plan: StepPlan) -> None:
        """Start the forward pass. Raises InternalFault for a plan that is not whole; nothing has run then."""
        if self._pending is not None:
            raise InternalFault("launch() before finish() of the step before", where="runner")
        for handle in plan.released:
            self._seeds.pop(handle, None)
        batch = Batch.of(plan, self.vocab_size, self.slots, self._decoder.device)
        self._pending = _Pending(batch, self._worker.submit(self._forward, batch))

    def finish(self, masks: Mapping[int, TokenMask]) -> StepResult:
        """Raises DeadlineExceeded when the pass takes longer than step_timeout_s, InternalFault when it
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
        with torch.inference_mode():
            rows = self._results(pending.batch, forward, masks)
        return StepResult(rows, forward.seconds + time.perf_counter() - begin)

    def copy_slots(self, pairs: Sequence[tuple[Run, Run]]) -> None:
        if self._pending is not None:
            raise InternalFault("copy_slots() during a step", where="runner")
        with torch.inference_mode():
            self._attention.pool.copy(pairs)

    def close(self) -> None:
        """Wait for a pass that still runs, within a limit, and end the thread."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.future.cancel()
            if not pending.future.cancelled():
                pending.future.exception(timeout=_CLOSE_WAIT_S)
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _forward(self, batch: Batch) -> _Forward:
        begin = time.perf_counter()
        decoder, count = self._decoder, len(batch.sampled)
        with torch.inference_mode():
            step = self._attention.begin(batch.plan)
            hidden = decoder.hidden(batch.ids, batch.positions, step, batch.wanted)
            logits = decoder.logits(hidden[:count])
            scores = scores_of(hidden[count:], batch.targets, decoder.logits, self.vocab_size)
            return _Forward(logits, logits.logsumexp(-1), finite(logits), scores, time.perf_counter() - begin)

    def _results(
        self, batch: Batch, forward: _Forward, masks: Mapping[int, TokenMask]
    ) -> tuple[RowResult, ...]:
        rows = [batch.plan.rows[index] for index in batch.sampled]
        # A row that is not finite is drawn from zeros and reported as an error: it must not disturb the
        # others.
        logits = forward.logits
        healthy = forward.finite.tolist()
        if not all(healthy):
            logits = logits.masked_fill(~forward.finite[:, None], 0.0)
        mine = {place: masks[index] for place, index in enumerate(batch.sampled) if index in masks}
        tokens = sample(logits, rows, mine, [self._draw(row) for row in rows])
        chosen = torch.tensor([token or 0 for token in tokens], dtype=torch.int64, device=logits.device)
        logprobs = (logits.gather(1, chosen[:, None]).squeeze(1) - forward.total).tolist()
        tops = top_of(logits, forward.total, [row.top_logprobs for row in rows])
        sampled = {
            index: (tokens[place], logprobs[place], tops[place], healthy[place])
            for place, index in enumerate(batch.sampled)
        }
        scores, first, results = forward.scores.tolist(), 0, []
        for index, row in enumerate(batch.plan.rows):
            own = tuple(scores[first : first + len(row.scores)])
            first += len(row.scores)
            results.append(_result(sampled.get(index), own))
        return tuple(results)

    def _draw(self, row: Row) -> float:
        if row.sampling.greedy:
            return 0.0
        seed = row.sampling.seed
        if seed is None:
            seed = self._seeds.get(row.seq)
            if seed is None:
                seed = self._seeds[row.seq] = self._random.getrandbits(63)
        return uniform(seed, row.step)


def _result(
    sampled: tuple[int | None, float, tuple[tuple[int, float], ...], bool] | None, scores: tuple[float, ...]
) -> RowResult:
    if any(score != score for score in scores) or (sampled is not None and not sampled[3]):
        return RowResult(error=NOT_FINITE)
    if sampled is None:
        return RowResult(scores=scores)
    token, logprob, top, _ = sampled
    if token is None:
        return RowResult(error=NOTHING_ALLOWED)
    return RowResult(token, logprob, scores, top)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts where it was built without the backend
        raise ModelLoadError(f"device {name!r} cannot be used: {error}", where="device") from error
    return device


def _dtype(name: str, device: torch.device, spec: ModelSpec) -> torch.dtype:
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if device.type == "cuda":
        return torch.bfloat16
    return torch.bfloat16 if spec.dtype == "bfloat16" and _multiplies_bfloat16() else torch.float32


def _multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products; without them float32 is 2 to 3 times as
    fast."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = next((line.split() for line in text.splitlines() if line.startswith("flags")), [])
    return bool({"amx_bf16", "avx512_bf16"} & set(flags))


def _packs(config: RunnerConfig, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether to keep packed copies of the matrices."""
    if device.type != "cpu" or dtype != torch.float32 or config.pack_weights == "never" or not can_pack():
        return False
    return config.pack_weights == "always" or memory.packing_fits(spec, dtype, device)
