"""DetokenizerManager: news in ids -> news in text, for many requests at once. Knows no scheduler and no
sockets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.processes.detokenize import IncrementalText, TextTable
from runtime.protocol.errors import InternalFault
from runtime.protocol.io_struct import (
    BatchStrOutput,
    BatchTokenIDOutput,
    FinishReason,
    StrOutput,
    TextRequest,
    TokenOutput,
)

MAX_STATES = 65_536


class _State:
    """One request: its text so far, and what its log-probabilities were."""

    __slots__ = ("input_logprobs", "logprobs", "request", "text", "top_logprobs")

    def __init__(self, table: TextTable, request: TextRequest) -> None:
        self.request = request
        self.text = IncrementalText(
            table,
            stop=request.stop,
            skip_special_tokens=request.skip_special_tokens,
            no_stop_trim=request.no_stop_trim,
            at_start=request.at_start,
        )
        self.logprobs: list[float | None] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.input_logprobs: list[float | None] | None = None

    def feed(self, news: TokenOutput) -> None:
        if news.replaced:
            del self.logprobs[-news.replaced :]
            del self.top_logprobs[-news.replaced :]
        self.logprobs += news.output_logprobs
        self.top_logprobs += news.output_top_logprobs
        if news.input_logprobs is not None:
            self.input_logprobs = news.input_logprobs
        self.text.feed(
            news.new_ids,
            news.replaced,
            finished=news.finish is not None,
            matched=None if news.finish is None else news.finish.matched,
        )

    def meta(self, news: TokenOutput) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "prompt_tokens": news.prompt_tokens,
            "completion_tokens": news.completion_tokens,
            "cached_tokens": news.cached_tokens,
            "jumped_tokens": news.jumped_tokens,
            "decode_steps": news.decode_steps,
            "queue_s": news.queue_s,
            "first_token_s": news.first_token_s,
        }
        if self.input_logprobs is not None:
            meta["input_logprobs"] = self.input_logprobs
        if self.logprobs:
            meta["output_logprobs"] = list(self.logprobs)
        if self.top_logprobs:
            meta["output_top_logprobs"] = list(self.top_logprobs)
        return meta


class DetokenizerManager:
    """Keeps at most `max_states` requests; when one more begins, the oldest ends with an error saying so."""

    def __init__(self, table: TextTable, max_states: int = MAX_STATES) -> None:
        self._table, self._max_states = table, max_states
        self._states: dict[str, _State] = {}

    def __len__(self) -> int:
        return len(self._states)

    def handle(self, batches: Sequence[BatchTokenIDOutput]) -> BatchStrOutput | None:
        """The text of all these news: one StrOutput per request that streams or is finished; None when there
        are none. News of requests that never began, or ended, are dropped."""
        ready: dict[str, StrOutput] = {}
        for batch in batches:
            for request in batch.begun:
                self._begin(request, ready)
            for news in batch.outputs:
                state = self._states.get(news.rid)
                if state is None:
                    continue
                output = self._feed(state, news)
                if news.finish is not None or (output is not None and output.finish is not None):
                    del self._states[news.rid]
                if output is not None:
                    ready[news.rid] = output
        if not ready:
            return None
        return BatchStrOutput(rids=list(ready), outputs=list(ready.values()))

    def _begin(self, request: TextRequest, ready: dict[str, StrOutput]) -> None:
        if len(self._states) >= self._max_states:
            oldest = next(iter(self._states))
            fault = InternalFault(
                f"the detokeniser keeps at most {self._max_states} requests and dropped this one, the oldest",
                hint="lower max_waiting_requests",
            )
            ready[oldest] = _failed(self._states.pop(oldest), fault)
        self._states[request.rid] = _State(self._table, request)

    def _feed(self, state: _State, news: TokenOutput) -> StrOutput | None:
        try:
            state.feed(news)
        except InternalFault as fault:
            return _failed(state, fault)
        if news.finish is None and not state.request.stream:
            return None
        return StrOutput(
            rid=news.rid,
            text=state.text.text,
            output_ids=list(state.text.ids),
            finish=news.finish,
            meta=state.meta(news),
            http_worker_ipc=state.request.http_worker_ipc,
        )


def _failed(state: _State, fault: InternalFault) -> StrOutput:
    return StrOutput(
        rid=state.request.rid,
        text=state.text.text,
        output_ids=list(state.text.ids),
        finish=FinishReason(type="abort", error=fault.to_dict()),
        http_worker_ipc=state.request.http_worker_ipc,
    )
