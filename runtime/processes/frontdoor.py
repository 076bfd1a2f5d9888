"""TokenizerManager: the front door. A request comes in, its text goes out; in between it is a rid and a
ticket.

Usable from any thread and any event loop. A caller that goes away takes its request with it; when the engine
dies, everybody who waits is told why. It knows mailboxes, not what is behind them.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from runtime.ipc.mailbox import Mailbox, MailboxClosed
from runtime.processes.prepare import Job, Preparer
from runtime.protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineDead,
    InternalFault,
    RuntimeFault,
    from_dict,
)
from runtime.protocol.io_struct import (
    AbortReq,
    BatchStrOutput,
    BatchTokenizedGenerateReqInput,
    ChoiceScores,
    ControlOutput,
    FlushCacheReq,
    GenerateOutput,
    GenerateReqInput,
    GetStateReq,
    StrOutput,
)

GRACE_S = 10.0
"""How much later than the request's own deadline the front door gives up on the scheduler's answer."""
LONG_PROMPT = 20_000
"""Characters from which a prompt is tokenised off the caller's event loop."""


class Ticket:
    """One request at the front door: what came of its parts so far. `notify` is called, from any thread,
    whenever there is something new to `take`."""

    def __init__(self, request: GenerateReqInput, job: Job, notify: Callable[[], None]) -> None:
        self.request, self.job, self.notify = request, job, notify
        self.began = time.monotonic()
        self.parts: list[StrOutput | None] = [None] * len(job.requests)
        self.fault: RuntimeFault | None = None
        self.index = {part.rid: at for at, part in enumerate(job.requests)}
        self.open = set(self.index)
        self._news = False
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        return self.fault is not None or not self.open

    def put(self, output: StrOutput) -> None:
        """An answer to one part; the first one that failed fails the whole."""
        with self._lock:
            self.parts[self.index[output.rid]] = output
            if output.finish is not None:
                self.open.discard(output.rid)
                if output.finish.type == "abort" and self.fault is None:
                    self.fault = _fault_of(output)
            self._news = True

    def fail(self, fault: RuntimeFault) -> None:
        with self._lock:
            if not self.done:
                self.fault = fault
            self._news = True

    def take(self) -> GenerateOutput | None:
        """What is new: the text so far; only all of it unless it streams. None: nothing. Raises the fault."""
        with self._lock:
            if self.fault is not None:
                raise _again(self.fault)
            if not self._news or (self.open and not self.request.stream):
                return None
            self._news = False
            if self.job.options:
                return None if self.open else _scores(self)
            output = self.parts[0]
            return None if output is None else _answer(self, output)

    def time_left(self) -> float | None:
        deadline = self.job.requests[0].deadline
        return None if deadline is None else max(0.0, deadline + GRACE_S - time.monotonic())

    def overdue(self) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"no answer within {self.request.timeout_s:g} s",
            where="timeout_s",
            hint="the engine may be overloaded",
        )


class TokenizerManager:
    """`outbox` leads to the scheduler; `handle` takes what comes back from the detokeniser."""

    def __init__(self, preparer: Preparer, outbox: Mailbox) -> None:
        self._preparer, self._outbox = preparer, outbox
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}
        self._requests: dict[str, Ticket] = {}
        self._controls: dict[str, _Answer] = {}
        self._dead: RuntimeFault | None = None

    @property
    def live(self) -> int:
        """Requests that are being waited for."""
        return len(self._requests)

    # -- for callers -----------------------------------------------------------------------------------------

    async def submit(self, request: GenerateReqInput) -> GenerateOutput:
        """The whole answer. Cancelling the task aborts the request."""
        waiter = _Waiter()
        ticket = await self._begin_async(_with_stream(request, False), waiter)
        try:
            while (output := ticket.take()) is None:
                await waiter.wait(ticket)
            return output
        finally:
            self.leave(ticket)

    async def stream(self, request: GenerateReqInput) -> AsyncGenerator[GenerateOutput, None]:
        """The text so far, again and again; the last one has `finish_reason` in its meta. Leaving early
        (aclose) aborts the request."""
        waiter = _Waiter()
        ticket = await self._begin_async(_with_stream(request, True), waiter)
        try:
            while True:
                output = ticket.take()
                if output is None:
                    await waiter.wait(ticket)
                    continue
                yield output
                if "finish_reason" in output.meta:
                    return
        finally:
            self.leave(ticket)

    def begin(self, request: GenerateReqInput, notify: Callable[[], None]) -> Ticket:
        """Send a request, to be waited for as a whole. Raises BadRequest and its kinds, EngineDead."""
        request = _with_stream(request, False)
        return self._open(request, self._preparer.prepare(request), notify)

    def wait(self, ticket: Ticket, event: threading.Event) -> GenerateOutput:
        """Block until `ticket` is answered; `event` is what its notify sets."""
        try:
            while True:
                output = ticket.take()
                if output is not None:
                    return output
                if not event.wait(ticket.time_left()):
                    raise ticket.overdue()
                event.clear()
        finally:
            self.leave(ticket)

    def abort(self, rid: str | None) -> None:
        """Cancel a request, or all (None). Its waiter gets Aborted from the scheduler; unknown rids are no
        error.
        """
        with self._lock:
            tickets = list(self._requests.values()) if rid is None else [self._requests.get(rid)]
        for ticket in tickets:
            if ticket is not None:
                self._cancel(ticket)

    def leave(self, ticket: Ticket) -> None:
        """The caller does not wait any more: forget the request, and cancel what is not finished."""
        with self._lock:
            self._requests.pop(ticket.request.rid, None)
            for rid in ticket.index:
                self._tickets.pop(rid, None)
        if ticket.open:
            self._cancel(ticket)

    def control(self, request: FlushCacheReq | GetStateReq, timeout: float) -> ControlOutput:
        """Ask the scheduler something and wait for its answer. Raises DeadlineExceeded, EngineDead."""
        answer = _Answer()
        with self._lock:
            self._check_alive()
            self._controls[request.rid] = answer
        try:
            self._post(request)
            if not answer.ready.wait(timeout):
                raise DeadlineExceeded(f"the scheduler did not answer within {timeout:g} s")
        finally:
            with self._lock:
                self._controls.pop(request.rid, None)
        if answer.output is None:
            raise self._gone()
        return answer.output

    # -- for the other side ----------------------------------------------------------------------------------

    def handle(self, item: BatchStrOutput | ControlOutput) -> None:
        """News from behind. Outputs of rids that nobody waits for are dropped."""
        if isinstance(item, ControlOutput):
            with self._lock:
                answer = self._controls.get(item.rid)
            if answer is not None:
                answer.output = item
                answer.ready.set()
            return
        changed: dict[int, Ticket] = {}
        with self._lock:
            for output in item.outputs:
                ticket = self._tickets.get(output.rid)
                if ticket is not None:
                    ticket.put(output)
                    changed[id(ticket)] = ticket
        for ticket in changed.values():
            ticket.notify()

    def fail_all(self, fault: RuntimeFault) -> None:
        """The engine is gone: tell everybody who waits, and everybody who comes."""
        with self._lock:
            self._dead = self._dead or fault
            tickets = list(self._requests.values())
            answers = list(self._controls.values())
        for ticket in tickets:
            ticket.fail(fault)
            ticket.notify()
        for answer in answers:
            answer.ready.set()

    # -- within ----------------------------------------------------------------------------------------------

    async def _begin_async(self, request: GenerateReqInput, waiter: _Waiter) -> Ticket:
        """Like begin; a long prompt is tokenised in a thread of the loop's pool."""
        if _size(request) > LONG_PROMPT:
            job = await waiter.loop.run_in_executor(None, self._preparer.prepare, request)
        else:
            job = self._preparer.prepare(request)

        def notify() -> None:
            try:
                waiter.loop.call_soon_threadsafe(waiter.changed.set)
            except RuntimeError:
                self._cancel(ticket)  # the caller's loop is closed: nobody will ever take the answer

        ticket = self._open(request, job, notify)
        return ticket

    def _open(self, request: GenerateReqInput, job: Job, notify: Callable[[], None]) -> Ticket:
        ticket = Ticket(request, job, notify)
        with self._lock:
            self._check_alive()
            if request.rid in self._requests:
                raise BadRequest(f"a request with the id {request.rid!r} is still running", where="rid")
            self._requests[request.rid] = ticket
            self._tickets.update(dict.fromkeys(ticket.index, ticket))
        self._send(ticket)
        return ticket

    def _send(self, ticket: Ticket) -> None:
        requests = ticket.job.requests
        try:
            if len(requests) == 1:
                self._post(requests[0])
            else:
                self._post(
                    BatchTokenizedGenerateReqInput(
                        rids=[part.rid for part in requests], requests=list(requests)
                    )
                )
        except RuntimeFault:
            self.leave(ticket)
            raise

    def _cancel(self, ticket: Ticket) -> None:
        for rid in list(ticket.open):
            try:
                self._outbox.send(AbortReq(rid=rid))
            except MailboxClosed:
                return

    def _post(self, item: msgspec.Struct) -> None:
        try:
            self._outbox.send(item)
        except MailboxClosed:
            raise self._gone() from None

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._gone()

    def _gone(self) -> RuntimeFault:
        return EngineDead("the engine was closed") if self._dead is None else _again(self._dead)


class _Waiter:
    """A coroutine of some event loop, waiting for news of its ticket."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()

    async def wait(self, ticket: Ticket) -> None:
        try:
            await asyncio.wait_for(self.changed.wait(), ticket.time_left())
        except TimeoutError:
            raise ticket.overdue() from None
        self.changed.clear()


class _Answer:
    """One control question that is being waited for."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.output: ControlOutput | None = None


def _with_stream(request: GenerateReqInput, stream: bool) -> GenerateReqInput:
    return request if request.stream is stream else msgspec.structs.replace(request, stream=stream)


def _size(request: GenerateReqInput) -> int:
    """Characters to tokenise, roughly."""
    size = len(request.text or "") + sum(len(message.content) for message in request.messages or ())
    return size * (1 + len(request.choices or ()))


def _again(fault: RuntimeFault) -> RuntimeFault:
    """A fresh copy: one object raised in many threads would gather all their tracebacks."""
    return type(fault)(fault.message, where=fault.where, hint=fault.hint)


def _fault_of(output: StrOutput) -> RuntimeFault:
    error = output.finish.error if output.finish is not None else None
    return from_dict(error) if error else InternalFault(f"request {output.rid} failed without a reason")


def _answer(ticket: Ticket, output: StrOutput) -> GenerateOutput:
    meta: dict[str, Any] = {"id": ticket.request.rid, **output.meta}
    if not ticket.request.return_logprob:
        for name in ("output_logprobs", "output_top_logprobs"):
            meta.pop(name, None)
    if output.finish is not None:
        meta["finish_reason"] = msgspec.to_builtins(output.finish)
        meta["e2e_s"] = time.monotonic() - ticket.began
    return GenerateOutput(text=output.text, output_ids=output.output_ids, meta=meta)


def _scores(ticket: Ticket) -> GenerateOutput:
    """All options' scores. Counters add up over the requests they were made with."""
    parts = [part for part in ticket.parts if part is not None]
    choices = [
        ChoiceScores(
            text=option.text,
            token_ids=list(option.ids),
            logprobs=_known(_tail(ticket, option.scored, len(option.ids)), option.text),
            unconditional=None if option.alone is None else _tail(ticket, option.alone, len(option.ids)),
        )
        for option in ticket.job.options
    ]
    meta: dict[str, Any] = {
        "id": ticket.request.rid,
        "finish_reason": {"type": "stop"},
        "completion_tokens": 0,
    }
    for name in ("prompt_tokens", "cached_tokens", "jumped_tokens", "decode_steps"):
        meta[name] = sum(part.meta.get(name, 0) for part in parts)
    meta["queue_s"] = max(part.meta.get("queue_s", 0.0) for part in parts)
    meta["e2e_s"] = time.monotonic() - ticket.began
    return GenerateOutput(text="", output_ids=[], meta=meta, choices=choices)


def _tail(ticket: Ticket, at: int, count: int) -> list[float | None]:
    """Log-probabilities of the last `count` tokens of a scored request."""
    part = ticket.parts[at]
    found = [] if part is None else list(part.meta.get("input_logprobs") or ())
    if len(found) != count:
        raise InternalFault(f"{len(found)} log-probabilities came for {count} tokens")
    return found


def _known(values: Sequence[float | None], text: str) -> list[float]:
    known = [value for value in values if value is not None and not math.isnan(value)]
    if len(known) != len(values):
        raise InternalFault(f"a token of the option {text!r} has no log-probability")
    return known
