"""DraftingRunner: a runner whose results include draft tokens from a smaller model.

Both models keep their KV in the same slots: the small model computes whatever the large one computes, once it
is known which drafts were right. So prefixes are shared, evicted and copied for both at once. The small
model's pool has some more slots for the tokens that it drafts. Drafts are sampled as the large model's tokens
are, with the same seed and step: if the two distributions agree, so do the samples.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from runtime.attention.layout import cut_runs
from runtime.config.checkpoints import draft_spec
from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig, World
from runtime.disagg.transfer.memory import KVMemory
from runtime.engine.batch import of_rows
from runtime.engine.runner import TorchRunner
from runtime.plan import Row, RowResult, Run, Segment, StepPlan, StepResult, TokenMask
from runtime.protocol.control import MemoryPart
from runtime.protocol.errors import InternalFault
from runtime.protocol.sampling import SamplingParams

ROWS = 256
"""This many rows of a pass have scratch slots for all guesses that they may ask for."""


class DraftingRunner:
    """Implements runtime.plan.Runner. The small model computes in finish(): only then is it known which
    tokens its guesses follow. most: guesses of a row; there are scratch slots for `rows` of them. positions:
    the small model's maximum sequence length; longer ones get no guesses."""

    def __init__(
        self,
        target: TorchRunner,
        draft: TorchRunner,
        most: int,
        positions: int,
        rows: int = ROWS,
        draft_path: str = "",
    ) -> None:
        self._target, self._draft, self._most, self._positions = target, draft, most, positions
        self._scratch = draft.slots - target.slots
        if self._scratch < most * rows:
            raise InternalFault(f"{self._scratch} slots for guesses of {rows} rows", where="draft model")
        self._plan: StepPlan | None = None
        self._draft_path = draft_path
        self.device, self.slots, self.vocab_size = target.device, target.slots, target.vocab_size
        # The small model guesses without adapters and images, and keeps its weights.
        self.verify, self.done, self.update_weights = target.verify, target.done, target.update_weights
        self.load_adapter, self.unload_adapter = target.load_adapter, target.unload_adapter
        self.load_images, self.drop_images = target.load_images, target.drop_images

    @property
    def kv_memory(self) -> KVMemory:
        return self._target.kv_memory

    @classmethod
    def load(
        cls,
        path: str | Path,
        spec: ModelSpec,
        config: RunnerConfig,
        *,
        beside: bool = True,
        kv_file: int | None = None,
        world: World | None = None,
    ) -> DraftingRunner:
        """TorchRunner.load(), and the model of config.draft_model. Raises ModelLoadError, also if its
        vocabulary differs."""
        folder, small = draft_spec(spec, config.draft_model or "")
        target = TorchRunner.load(
            path,
            spec,
            dataclasses.replace(config, draft_model=None, draft_tokens=0),
            beside=beside,
            kv_file=kv_file,
            world=world,
        )
        try:
            theirs = dataclasses.replace(
                config,
                draft_model=None,
                draft_tokens=0,
                max_total_tokens=target.slots + ROWS * config.draft_tokens,
                quantization=None,
                shared_kv=False,
                lookahead=False,
                enable_lora=False,
                adapters=(),
            )
            draft = TorchRunner.load(folder, small, theirs, beside=beside)
        except BaseException:
            target.close()
            raise
        return cls(target, draft, config.draft_tokens, small.max_position_embeddings, draft_path=str(folder))

    def launch(self, plan: StepPlan) -> None:
        self._target.launch(plan)
        self._plan = plan

    def finish(self, masks: Mapping[int, TokenMask]) -> StepResult:
        plan, self._plan = self._plan, None
        result = self._target.finish(masks)
        if plan is None:
            raise InternalFault("finish() without launch()", where="runner")
        begin = time.perf_counter()
        guesses = self._guess(plan, result.rows)
        rows = [
            replace(one, guesses=tuple(guesses[index])) if index in guesses else one
            for index, one in enumerate(result.rows)
        ]
        return StepResult(tuple(rows), result.seconds + time.perf_counter() - begin, result.forward_s)

    def release_memory(self, parts: Sequence[MemoryPart]) -> None:
        """Of both models."""
        self._target.release_memory(parts)
        self._draft.release_memory(parts)

    def restore_memory(self, parts: Sequence[MemoryPart], path: str) -> None:
        """Of both models; `path` is the large one's."""
        self._target.restore_memory(parts, path)
        self._draft.restore_memory(parts, self._draft_path)

    def close(self) -> None:
        self._target.close()
        self._draft.close()

    # -- guessing --------------------------------------------------------------------------------------------

    def _guess(self, plan: StepPlan, results: Sequence[RowResult]) -> dict[int, list[int]]:
        """Compute the plan with the small model, without the wrong drafts, and continue the rows that ask for
        guesses. Returns guesses by row."""
        first, used = self._target.slots, 0
        rows: list[Row] = []
        plan_rows: list[int] = []  # the index in the plan of each of `rows`
        scratch_of: dict[int, Run] = {}  # by index in the plan: slots for the guesses
        for plan_row, (row, result) in enumerate(zip(plan.rows, results)):
            right = max(0, len(result.samples) - 1)
            tokens = row.tokens[: len(row.tokens) - row.drafts + right]
            count = min(row.guesses, self._most) if result.samples else 0
            if row.position + len(tokens) + count >= self._positions:
                continue
            slots = cut_runs(row.slots, 0, len(tokens))
            if count and used + count <= self._scratch:
                scratch_of[plan_row] = Run(first + used, count)
                used += count
                last = result.samples[-1].token
                mine = _asking(row, (*tokens, last), (*slots, Run(scratch_of[plan_row].start, 1)), right + 1)
                rows.append(replace(mine, output=[*row.output, *tokens[len(tokens) - right :], last]))
            else:
                rows.append(_asking(row, tokens, slots, None))
            plan_rows.append(plan_row)
        guesses: dict[int, list[int]] = {plan_row: [] for plan_row in scratch_of}
        segments = list(plan.segments)
        released = plan.released
        while rows:
            index = {plan_row: at for at, plan_row in enumerate(plan_rows)}
            step = StepPlan(tuple(rows), of_rows(segments, index), released)
            released = ()
            self._draft.launch(step)
            segments = [
                replace(one, rows=tuple([plan_rows[row] for row in one.rows])) for one in step.segments
            ]
            segments += [Segment(row.slots, (of,), row.position) for row, of in zip(rows, plan_rows)]
            following: list[Row] = []
            kept: list[int] = []
            for plan_row, row, result in zip(plan_rows, rows, self._draft.finish({}).rows):
                if plan_row not in scratch_of or not result.samples:
                    continue
                token, scratch = result.samples[0].token, scratch_of[plan_row]
                guesses[plan_row].append(token)
                done = len(guesses[plan_row])
                if done < scratch.length:
                    following.append(_next(row, token, scratch.start + done))
                    kept.append(plan_row)
            rows, plan_rows = following, kept
        return guesses


def _asking(row: Row, tokens: Sequence[int], slots: Sequence[Run], ahead: int | None) -> Row:
    """`row` as the small model computes it. ahead: a token is sampled after it, this many steps later; None:
    only its KV is needed."""
    sampling = row.sampling
    if sampling.custom_logit_processor is not None:
        sampling = SamplingParams(temperature=0.0)
    return Row(
        row.seq,
        tuple(tokens),
        row.position,
        tuple(slots),
        sampling,
        sample=ahead is not None,
        step=row.step + (ahead or 0),
        prompt=row.prompt,
        logprob=False,
    )


def _next(row: Row, token: int, slot: int) -> Row:
    """The row that computes `token`, sampled after `row`, in `slot`."""
    return replace(
        row,
        tokens=(token,),
        position=row.position + len(row.tokens),
        slots=(Run(slot, 1),),
        step=row.step + 1,
        output=[*row.output, token],
    )
