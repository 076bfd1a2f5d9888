"""Outbox: who has an output due, until somebody asks. Making outputs costs as much as finding the
tokens, so it is put off until the next step is under way. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.protocol.io_struct import (
    FinishReason,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from runtime.scheduler.requests.request import Request


class Outbox:
    """`pieces`: plain requests that stream and have a token more; appended to directly, for each token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: list[TokenOutput] = []  # made already
        self._outputs: list[tuple[Request, FinishReason | None]] = []
        self.pieces: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._answers or self._outputs or self.pieces)

    def refuse(
        self, req: TokenizedGenerateReqInput | TokenizedEmbeddingReqInput, reason: FinishReason
    ) -> None:
        """It ends with an error, and nothing was computed of it."""
        self.answer(
            TokenOutput(
                rid=req.rid,
                new_ids=[],
                finish=reason,
                prompt_tokens=len(req.input_ids),
                http_worker_ipc=req.http_worker_ipc,
            )
        )

    def answer(self, output: TokenOutput) -> None:
        self._answers.append(output)

    def add(self, request: Request, finish: FinishReason | None) -> None:
        self._outputs.append((request, finish))

    def drain(self) -> list[TokenOutput]:
        """All of it, each once."""
        outputs, self._answers = self._answers, []
        if self.pieces:
            pieces, self.pieces = self.pieces, []
            outputs += [piece for request in pieces if (piece := request.piece()) is not None]
        if self._outputs:
            due, self._outputs = self._outputs, []
            now = self._clock()
            outputs += [one for request, end in due if (one := request.output(now, end)) is not None]
        return outputs
