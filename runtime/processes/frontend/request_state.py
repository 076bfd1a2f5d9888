"""RequestState: one request at the frontend, the outputs of its parts so far, and its answers.

Threads put outputs, the caller takes answers. It knows no mailboxes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from runtime.processes.frontend.client import ANYONE, CLIENT, Begun, Observer
from runtime.processes.frontend.output_accumulator import Facts, OutputAccumulator
from runtime.processes.frontend.prepare import Job
from runtime.protocol.errors import (
    Aborted,
    BadRequest,
    DeadlineExceeded,
    InternalFault,
    RuntimeFault,
    from_dict,
)
from runtime.protocol.io_struct import (
    ChoiceScores,
    EmbeddingOutput,
    EmbeddingReqInput,
    OutputDelta,
    TokenOutput,
)
from runtime.protocol.requests.generate import SALT, SingleGenerateReq

GRACE_S = 10.0
"""How much later than the request's own deadline the frontend gives up on the scheduler's answer."""
ENTRY_BYTES, NUMBER_BYTES = 40, 20
"""Approximate JSON size of one log-probability with its token, and of one number of a hidden state."""
_SUMMED = (
    "prompt_tokens", "completion_tokens", "cached_tokens", "jumped_tokens", "decode_steps", "num_retractions",
)  # fmt: skip


class AnswerBudget:
    """Bytes that log-probabilities and hidden states of one answer may take, all its samples together; most:
    None for no limit."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._used = 0

    def take(self, size: int) -> None:
        """Raises BadRequest if the answer becomes too large."""
        self._used += size
        if self.most is not None and self._used > self.most:
            raise BadRequest(
                f"the log-probabilities and hidden states of the response take more than {self.most} bytes",
                where="top_logprobs_num / return_hidden_states",
                hint="ask for fewer tokens, samples or log-probabilities; max_answer_bytes",
            )


def size_of(output: TokenOutput) -> int:
    """Approximate JSON size of its log-probabilities and hidden states, in bytes."""
    lists = (output.output_top_logprobs, output.output_token_ids_logprobs,
             output.input_top_logprobs or (), output.input_token_ids_logprobs or ())  # fmt: skip
    entries = len(output.output_logprobs) + len(output.input_logprobs or ())
    entries += sum(len(pairs) for positions in lists for pairs in positions if pairs)
    numbers = sum(map(len, output.hidden_states or ()))
    return ENTRY_BYTES * entries + NUMBER_BYTES * numbers


class RequestState:
    """A request for text or for a vector. `notify` is called, from any thread, when there may be something
    new to `take`."""

    def __init__(
        self,
        request: SingleGenerateReq | EmbeddingReqInput,
        job: Job,
        notify: Callable[[], None],
        facts: Facts,
        observers: Sequence[Observer] = (),
        budget: AnswerBudget | None = None,
    ) -> None:
        self.request, self.job, self.notify, self._facts = request, job, notify, facts
        self.rid = str(request.rid)
        self.began = time.monotonic()
        self.outputs: list[OutputAccumulator] = []
        self.vector: EmbeddingOutput | None = None
        if isinstance(request, SingleGenerateReq):
            self._budget = budget if budget is not None and budget.most is not None else None
            text_of = facts.text_of if request.return_text_in_logprobs else None
            self.stream, is_chat = request.stream, request.messages is not None
            self.outputs = [
                OutputAccumulator(part, text_of, facts.boundary(part, is_chat)) for part in job.requests
            ]
        else:
            self._budget, self.stream = None, False
        self.fault: RuntimeFault | None = None
        self.index = {part.rid: at for at, part in enumerate(job.parts)}
        self.open = set(self.index)
        self.cancelled = False
        self._due = None if job.deadline is None else job.deadline + GRACE_S
        self.client = CLIENT.get()
        # The number of cached tokens would tell a tenant about others' prompts.
        salted = (job.parts[0].extra_key or "").startswith(SALT)
        self._hides_cached = self.client.is_tenant and not salted
        self._observers = observers if request.log_metrics else ()
        self._changed = self._ended = False
        self._last_output_at = 0.0
        self._lock = threading.Lock()
        self._begun = Begun(
            self.rid,
            sum(len(part.input_ids) for part in job.parts),
            self.stream,
            self.began,
            request.custom_labels or {},
        )

    @property
    def done(self) -> bool:
        return self.fault is not None or not self.open

    # -- the engine's side -----------------------------------------------------------------------------------

    def put(self, output: TokenOutput | EmbeddingOutput) -> None:
        """Take in an output of one part; the first part that fails fails the request."""
        count = 0
        with self._lock:
            if isinstance(output, TokenOutput):
                part = self.outputs[self.index[output.rid]]
                if self._budget is not None:
                    try:
                        self._budget.take(size_of(output))
                    except BadRequest as fault:
                        self.fault = self.fault or fault
                before = part.total
                part.add(output)
                count = part.total - before
                ended = output.finish is not None
            else:
                self.vector, ended = output, True
            if ended:
                self.open.discard(output.rid)
            if output.finish is not None and output.finish.type == "abort" and self.fault is None:
                self.fault = _fault_of(output, self.rid)
            self._changed = True
            done = self.done
            ends, self._ended = done and not self._ended, self._ended or done
        if count > 0:
            self._observe_tokens(count)
            if self.client is not ANYONE:
                self.client.spend(count)
        if ends:
            self._observe_end()

    def fail(self, fault: RuntimeFault) -> None:
        with self._lock:
            if not self.done:
                self.fault = fault
            self._changed = True
            ends, self._ended = not self._ended, True
        if ends:
            self._observe_end()

    # -- the caller's side -----------------------------------------------------------------------------------

    def start(self) -> None:
        """The request is being sent."""
        for observer in self._observers:
            observer.on_begin(self._begun)
        if self.client is not ANYONE:
            self.client.spend(self.job.prompt_tokens)

    def leave(self) -> None:
        """The caller stops waiting."""
        with self._lock:
            left, self._ended = not self._ended, True
        if left:
            for observer in self._observers:
                observer.on_abort(self._begun, None, self._elapsed())

    def take(self) -> OutputDelta | EmbeddingOutput | None:
        """The output since the last call; all of it, at the end, if the request does not stream. None: there
        is none. Raises the fault."""
        with self._lock:
            if self.fault is not None:
                fault = again(self.fault)
                if isinstance(fault, Aborted) and self.outputs and not self.job.options:
                    fault.partial = self._answer(self.outputs[0])
                raise fault
            if not self._changed or (self.open and not self.stream):
                return None
            self._changed = False
            if self.vector is not None:
                return self._answer_of(self.vector)
            if self.job.options:
                return None if self.open else self._scores()
            return self._answer(self.outputs[0])

    def time_left(self) -> float | None:
        return None if self._due is None else max(0.0, self._due - time.monotonic())

    def overdue(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"no answer within {self.request.timeout_s:g} s",
            where="timeout_s",
            hint="the engine may be overloaded",
        )

    # -- answers ---------------------------------------------------------------------------------------------

    def _answer(self, part: OutputAccumulator) -> OutputDelta:
        request: Any = self.request  # a SingleGenerateReq; this runs once per token
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": part.finish_reason(),
            **part.counters(),
            **({"cached_tokens": 0} if self._hides_cached else {}),
            "reasoning_tokens": 0 if part.reasoning is None else part.reasoning.tokens,
            "weight_version": self._facts.weight_version,
            "dp_rank": 0,  # there is one engine
            **(part.logprob_meta() if part.lists else {}),
            "e2e_latency": self._elapsed(),
        }
        if part.grammar is not None:
            meta["grammar"] = dict(part.grammar)
        if part.request.require_reasoning:
            meta["answer_start"] = None if part.reasoning is None else part.reasoning.answer_start
        elif self.job.reasoning_begun is not None:
            meta["reasoning_begun"] = self.job.reasoning_begun
        if request.return_hidden_states:
            meta["hidden_states"] = part.hidden_states
        if request.return_prompt_token_ids:
            meta["prompt_token_ids"] = part.request.input_ids
        if request.cumulative:
            return OutputDelta(text=part.text, output_ids=list(part.ids), meta=meta)
        delta = OutputDelta(text=part.text, output_ids=part.ids, meta=meta, replaced=part.replaced)
        part.drain()
        return delta

    def _answer_of(self, vector: EmbeddingOutput) -> EmbeddingOutput:
        vector.rid = self.rid
        vector.meta = {**vector.meta, "e2e_latency": self._elapsed()}
        if self._hides_cached:
            vector.cached_tokens = 0
        return vector

    def _scores(self) -> OutputDelta:
        """All options' scores. Counters are sums over the requests of all options."""
        choices: list[ChoiceScores] = []
        for option in self.job.options:
            logprobs = self._tail(option.scored, len(option.ids))
            if any(value is None or math.isnan(value) for value in logprobs):
                raise InternalFault(f"a token of the option {option.text!r} has no log-probability")
            choices.append(
                ChoiceScores(
                    text=option.text,
                    token_ids=list(option.ids),
                    logprobs=[value for value in logprobs if value is not None],
                    unconditional=None if option.alone is None else self._tail(option.alone, len(option.ids)),
                    token_texts=list(map(self._facts.text_of, option.ids)),
                )
            )
        meta = {
            "id": self.rid,
            "finish_reason": {"type": "stop"},
            **self._summed(),
            **({"cached_tokens": 0} if self._hides_cached else {}),
            "e2e_latency": self._elapsed(),
        }
        return OutputDelta(text="", output_ids=[], meta=meta, choices=choices)

    def _summed(self) -> dict[str, Any]:
        counters = [part.counters() for part in self.outputs]
        if (vector := self.vector) is not None:
            counts = {"prompt_tokens": vector.prompt_tokens, "cached_tokens": vector.cached_tokens}
            counters.append(counts | vector.meta)
        totals: dict[str, Any] = {name: sum(one.get(name, 0) for one in counters) for name in _SUMMED}
        for name in ("queue_time", "first_token_latency"):
            totals[name] = max(one.get(name, 0.0) for one in counters)
        return totals

    def _tail(self, at: int, count: int) -> list[float | None]:
        """Log-probabilities of the last `count` tokens of a scored request."""
        scored = self.outputs[at].scored
        logprobs = list((None if scored is None else scored.input_logprobs) or ())
        if len(logprobs) != count:
            raise InternalFault(f"{len(logprobs)} log-probabilities came for {count} tokens")
        return logprobs

    # -- observers -------------------------------------------------------------------------------------------

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _observe_tokens(self, count: int) -> None:
        now = time.monotonic()
        before, self._last_output_at = self._last_output_at, now
        for observer in self._observers:
            if before:
                observer.on_tokens(self._begun, count, now - before)
            else:
                observer.on_first_token(self._begun, now - self.began)

    def _observe_end(self) -> None:
        if not self._observers:
            return
        meta: dict[str, Any] = {}
        if self.fault is None:
            reason = self.outputs[0].finish_reason() if self.outputs else {"type": "stop"}
            meta = {"finish_reason": reason, **self._summed()}
        for observer in self._observers:
            if self.fault is None:
                observer.on_finish(self._begun, meta, self._elapsed())
            else:
                observer.on_abort(self._begun, self.fault, self._elapsed())


def again(fault: RuntimeFault) -> RuntimeFault:
    """A fresh copy: one object raised in many threads would gather all their tracebacks."""
    return type(fault)(fault.message, where=fault.where, hint=fault.hint)


def _fault_of(output: TokenOutput | EmbeddingOutput, rid: str) -> RuntimeFault:
    """`rid`: the caller's id of the request, in place of the engine's."""
    error = output.finish.error if output.finish is not None else None
    if not error:
        return InternalFault(f"request {rid} failed without a reason")
    return from_dict({**error, "where": rid} if error.get("where") == output.rid else error)
