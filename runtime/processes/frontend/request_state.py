"""RequestState: one request at the frontend, the outputs of its parts so far, and its answers.

Threads put outputs, the caller takes answers. It knows no mailboxes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from runtime.processes.frontend.client import CLIENT
from runtime.processes.frontend.observe import NOBODY, Begun, Observer
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
from runtime.protocol.io_struct import ChoiceScores, OutputDelta, StrOutput, TokenOutput
from runtime.protocol.requests.single import SALT, SingleGenerateReq

GRACE_S = 10.0
"""How much later than the request's own deadline the frontend gives up on the scheduler's answer."""
_SUMMED = (
    "prompt_tokens", "completion_tokens", "cached_tokens", "jumped_tokens", "decode_steps", "num_retractions",
)  # fmt: skip


class AnswerRoom:
    """Bytes that log-probabilities and hidden states of one answer may take, all its samples together."""

    def __init__(self, most: int | None) -> None:
        self.most = most
        self._taken = 0

    def take(self, size: int) -> None:
        """Raises BadRequest when there is no room for it."""
        self._taken += size
        if self.most is not None and self._taken > self.most:
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
    entries += sum(len(pairs) for some in lists for pairs in some if pairs)
    numbers = sum(map(len, output.hidden_states or ()))
    return ENTRY_BYTES * entries + NUMBER_BYTES * numbers


ENTRY_BYTES, NUMBER_BYTES = 40, 20
"""Approximate JSON size of one log-probability with its token, and of one number of a hidden state."""


class RequestState:
    """`notify` is called, from any thread, whenever there may be something new to `take`. observer: gets
    its begin, its tokens and its end."""

    def __init__(
        self,
        request: SingleGenerateReq,
        job: Job,
        notify: Callable[[], None],
        facts: Facts,
        observer: Observer = NOBODY,
        room: AnswerRoom | None = None,
    ) -> None:
        self.request, self.job, self.notify = request, job, notify
        self._room = room if room is not None and room.most is not None else None
        self.began = time.monotonic()
        self._text_of = facts.text_of if request.return_text_in_logprobs else None
        is_chat = request.messages is not None
        self.outputs = [
            OutputAccumulator(part, self._text_of, facts.boundary(part, is_chat)) for part in job.requests
        ]
        self.fault: RuntimeFault | None = None
        self.index = {part.rid: at for at, part in enumerate(job.requests)}
        self.open = set(self.index)
        self.cancelled = False
        self._due = None if job.deadline is None else job.deadline + GRACE_S
        self._facts = facts
        self.client = CLIENT.get()
        # What all clients share may hold others' prompts.
        salted = (job.requests[0].extra_key or "").startswith(SALT)
        self._hides_cached = self.client.is_tenant and not salted
        self._observer = observer if request.log_metrics else NOBODY
        self._changed = self._over = False
        self._heard_at = 0.0
        self._lock = threading.Lock()
        self._begun = Begun(
            request.rid,
            sum(len(part.input_ids) for part in job.requests),
            request.stream,
            self.began,
            request.custom_labels or {},
        )

    @property
    def done(self) -> bool:
        return self.fault is not None or not self.open

    # -- the engine's side -----------------------------------------------------------------------------------

    def put(self, output: StrOutput) -> None:
        """What is new of one part; the first one that failed fails the whole."""
        with self._lock:
            part = self.outputs[self.index[output.rid]]
            before = part.total
            if self._room is not None:
                try:
                    self._room.take(size_of(output.delta))
                except BadRequest as fault:
                    self.fault = self.fault or fault
            part.add(output)
            if (finish := output.finish) is not None:
                self.open.discard(output.rid)
                if finish.type == "abort" and self.fault is None:
                    self.fault = _fault_of(output, self.request.rid)
            self._changed = True
            done = self.done
            over, self._over = done and not self._over, self._over or done
        self._observe(part.total - before)
        if part.total > before:
            self.client.spend(part.total - before)
        if over:
            self._observe_end()

    def fail(self, fault: RuntimeFault) -> None:
        with self._lock:
            if not self.done:
                self.fault = fault
            self._changed = True
            over, self._over = not self._over, True
        if over:
            self._observe_end()

    # -- the caller's side -----------------------------------------------------------------------------------

    def start(self) -> None:
        """The request is being sent."""
        self._observer.on_begin(self._begun)
        self.client.spend(self.job.prompt_tokens)

    def leave(self) -> None:
        """The caller stops waiting."""
        with self._lock:
            gone, self._over = not self._over, True
        if gone:
            self._observer.on_abort(self._begun, None, self._elapsed())

    def take(self) -> OutputDelta | None:
        """What is new since the last call, all of it where the request does not stream and is over. None:
        nothing. Raises the fault."""
        with self._lock:
            if self.fault is not None:
                raise self._failure(self.fault)
            if not self._changed or (self.open and not self.request.stream):
                return None
            self._changed = False
            if self.job.options:
                return None if self.open else self._scores()
            return self._answer(self.outputs[0])

    def _failure(self, fault: RuntimeFault) -> RuntimeFault:
        """The fault for the caller; what was generated until a cancellation goes with it."""
        fresh = again(fault)
        match fresh:
            case Aborted() if not self.job.options:
                fresh.partial = self._answer(self.outputs[0])
        return fresh

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
        request = self.request
        meta: dict[str, Any] = {
            "id": request.rid,
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

    def _scores(self) -> OutputDelta:
        """All options' scores. Counters are sums over the requests of all options."""
        choices = [
            ChoiceScores(
                text=option.text,
                token_ids=list(option.ids),
                logprobs=_known(self._tail(option.scored, len(option.ids)), option.text),
                unconditional=None if option.alone is None else self._tail(option.alone, len(option.ids)),
                token_texts=list(map(self._facts.text_of, option.ids)),
            )
            for option in self.job.options
        ]
        meta = {
            "id": self.request.rid,
            "finish_reason": {"type": "stop"},
            **self._summed(),
            **({"cached_tokens": 0} if self._hides_cached else {}),
            "e2e_latency": self._elapsed(),
        }
        return OutputDelta(text="", output_ids=[], meta=meta, choices=choices)

    def _summed(self) -> dict[str, Any]:
        counters = [part.counters() for part in self.outputs]
        totals: dict[str, Any] = {name: sum(one.get(name, 0) for one in counters) for name in _SUMMED}
        for name in ("queue_time", "first_token_latency"):
            totals[name] = max(one.get(name, 0.0) for one in counters)
        return totals

    def _tail(self, at: int, count: int) -> list[float | None]:
        """Log-probabilities of the last `count` tokens of a scored request."""
        scored = self.outputs[at].scored
        found = list((None if scored is None else scored.input_logprobs) or ())
        if len(found) != count:
            raise InternalFault(f"{len(found)} log-probabilities came for {count} tokens")
        return found

    # -- observers -------------------------------------------------------------------------------------------

    def _elapsed(self) -> float:
        return time.monotonic() - self.began

    def _observe(self, count: int) -> None:
        if count <= 0:
            return
        now = time.monotonic()
        before, self._heard_at = self._heard_at, now
        if before:
            self._observer.on_tokens(self._begun, count, now - before)
        else:
            self._observer.on_first_token(self._begun, now - self.began)

    def _observe_end(self) -> None:
        if self.fault is not None:
            self._observer.on_abort(self._begun, self.fault, self._elapsed())
            return
        meta = {"finish_reason": self.outputs[0].finish_reason(), **self._summed()}
        self._observer.on_finish(self._begun, meta, self._elapsed())


def again(fault: RuntimeFault) -> RuntimeFault:
    """A fresh copy: one object raised in many threads would gather all their tracebacks."""
    return type(fault)(fault.message, where=fault.where, hint=fault.hint)


def _fault_of(output: StrOutput, rid: str) -> RuntimeFault:
    """`rid`: what the caller calls the request; in the engine it has another id, which stays there."""
    error = output.finish.error if output.finish is not None else None
    if not error:
        return InternalFault(f"request {rid} failed without a reason")
    return from_dict({**error, "where": rid} if error.get("where") == output.rid else error)


def _known(values: Sequence[float | None], text: str) -> list[float]:
    known = [value for value in values if value is not None and not math.isnan(value)]
    if len(known) != len(values):
        raise InternalFault(f"a token of the option {text!r} has no log-probability")
    return known
