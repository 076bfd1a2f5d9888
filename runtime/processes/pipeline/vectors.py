"""Vectors: the embedding requests in the scheduler's process.

A decoder computes one as a generation of no tokens that returns hidden states, in the same scheduler as all
others; an encoder has an EmbeddingScheduler. Knows no tensors: a vector is a list of floats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias, cast

from runtime.config.pooling import DECODER_DEFAULT, Pooling
from runtime.plan import Runner, TextRunner
from runtime.protocol.errors import BadRequest, InternalFault, RuntimeFault
from runtime.protocol.io_struct import (
    EmbeddingOutput,
    FinishReason,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from runtime.protocol.sampling import SamplingParams
from runtime.scheduler.embedding_scheduler import EmbeddingLoop, EmbeddingScheduler, check_dimensions
from runtime.scheduler.loop import Loop
from runtime.scheduler.requests.request import failure
from runtime.scheduler.scheduler import Scheduler

AnyScheduler: TypeAlias = Scheduler | EmbeddingScheduler
NOTHING_NEW = SamplingParams(max_new_tokens=0)


class Vectors:
    """live: embedding requests by id. scores: the answers are a classifier's, and stay as they are. width:
    numbers in a vector; None: unknown before the first."""

    def __init__(
        self, pooling: Pooling = DECODER_DEFAULT, *, scores: bool = False, width: int | None = None
    ) -> None:
        self._pooling, self._scores, self._width = pooling, scores, width
        self.live: dict[str, TokenizedEmbeddingReqInput] = {}

    def add(self, request: TokenizedEmbeddingReqInput, scheduler: AnyScheduler) -> None:
        """Give it to the scheduler. Raises BadRequest."""
        match scheduler:
            case EmbeddingScheduler():
                scheduler.embed(request)
            case Scheduler():
                scheduler.add(self._generation(request))

    def split(self, outputs: Sequence[TokenOutput]) -> tuple[list[TokenOutput], list[EmbeddingOutput]]:
        """Outputs of generations, and those of embedding requests as vectors."""
        texts: list[TokenOutput] = []
        vectors: list[EmbeddingOutput] = []
        for output in outputs:
            if output.rid not in self.live:
                texts.append(output)
            elif output.finish is not None:
                vectors.append(self._answer(self.live.pop(output.rid), output, output.finish))
        return texts, vectors

    def _generation(self, request: TokenizedEmbeddingReqInput) -> TokenizedGenerateReqInput:
        if request.cross_encoder:
            raise BadRequest(
                "this model generates: it has no classifier to score pairs with",
                where="is_cross_encoder_request",
            )
        if self._width is not None and request.dimensions is not None:
            check_dimensions(request.dimensions, self._width)
        return TokenizedGenerateReqInput(
            rid=request.rid,
            http_worker_ipc=request.http_worker_ipc,
            input_ids=request.input_ids,
            sampling_params=NOTHING_NEW,
            return_hidden_states="last" if self._pooling.mode == "last" else True,
            embedding=True,
            priority=request.priority,
            extra_key=request.extra_key,
            flow=request.flow,
            lora_path=request.lora_path,
            time_left_s=request.time_left_s,
        )

    def _answer(
        self, request: TokenizedEmbeddingReqInput, output: TokenOutput, finish: FinishReason
    ) -> EmbeddingOutput:
        if finish.type == "abort":
            return failed_vector(request, finish)
        try:
            vector = self._vector(request, output.hidden_states or [])
        except RuntimeFault as fault:
            return failed_vector(request, failure(fault))
        return EmbeddingOutput(
            rid=request.rid,
            embedding=vector,
            prompt_tokens=output.prompt_tokens,
            cached_tokens=output.cached_tokens,
            meta={"queue_time": output.queue_s},
            http_worker_ipc=request.http_worker_ipc,
        )

    def _vector(self, request: TokenizedEmbeddingReqInput, states: list[list[float]]) -> list[float]:
        if not states:
            raise InternalFault("no hidden states came for the text")
        vector = states[0] if len(states) == 1 else pooled(self._pooling.mode, states)
        if self._scores:
            return vector
        if request.dimensions is None:
            return unit(vector) if self._pooling.normalize else vector
        check_dimensions(request.dimensions, len(vector))
        return unit(vector[: request.dimensions])


def loop_of(scheduler: AnyScheduler, runner: Runner | TextRunner) -> Loop | EmbeddingLoop:
    """The loop for a scheduler and its kind of runner."""
    match scheduler:
        case EmbeddingScheduler():
            return EmbeddingLoop(scheduler, cast(TextRunner, runner))
        case Scheduler():
            return Loop(scheduler, cast(Runner, runner), overlap=scheduler.config.overlap)


def pooled(mode: str, states: Sequence[Sequence[float]]) -> list[float]:
    """One vector for a text, from one per token."""
    match mode:
        case "cls":
            return list(states[0])
        case "mean":
            return [math.fsum(column) / len(states) for column in zip(*states, strict=True)]
        case "max":
            return [max(column) for column in zip(*states, strict=True)]
        case _:
            return list(states[-1])


def unit(vector: Sequence[float]) -> list[float]:
    """The vector with length 1; zeros stay zeros."""
    length = math.hypot(*vector)
    return [value / length for value in vector] if length > 0 else list(vector)


def failed_vector(request: TokenizedEmbeddingReqInput, reason: FinishReason) -> EmbeddingOutput:
    return EmbeddingOutput(
        rid=request.rid,
        embedding=[],
        prompt_tokens=len(request.input_ids),
        finish=reason,
        http_worker_ipc=request.http_worker_ipc,
    )
