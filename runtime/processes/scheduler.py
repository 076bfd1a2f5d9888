"""SchedulerProcess: joins the two wings. One thread owns the scheduler, the runner and the grammars.

Takes requests from a mailbox, steps, and posts news to another. What goes wrong with one request ends that
request; what goes wrong with a step ends the requests that were running; only when even that fails does the
process end, and then its cause is in `run`'s exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from runtime.grammar.manager import GrammarManager
from runtime.ipc.mailbox import Mailbox, MailboxClosed
from runtime.plan import Runner
from runtime.protocol.errors import EngineDead, InternalFault, RuntimeFault
from runtime.protocol.io_struct import (
    AbortReq,
    BatchTokenIDOutput,
    BatchTokenizedGenerateReqInput,
    ControlOutput,
    FinishReason,
    FlushCacheReq,
    GetStateReq,
    TextRequest,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from runtime.scheduler.loop import step
from runtime.scheduler.scheduler import Scheduler

IDLE_S = 5.0
"""How long one wait for mail lasts; a new one follows."""
BLOCKED_S = 0.001
"""How long to wait for mail while requests wait for something other than a step (their grammar)."""
MAX_FAULTS_IN_A_ROW = 3


class SchedulerProcess:
    """`run()` until the inbox is closed. Other threads may read `stalled_s`."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        grammar: GrammarManager | None,
        inbox: Mailbox,
        outbox: Mailbox,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler, self._runner, self._grammar = scheduler, runner, grammar
        self._inbox, self._outbox, self._clock = inbox, outbox, clock
        self._begun: list[TextRequest] = []
        self._live: set[str] = set()
        self._faults = 0
        self._working_since: float | None = None

    @property
    def stalled_s(self) -> float:
        """Seconds since the work in hand began; 0 while waiting for mail."""
        since = self._working_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def run(self) -> None:
        """Serve until the inbox is closed; then end what still runs, and release runner and grammars."""
        try:
            wait = 0.0
            while True:
                self._working_since = None
                mail = self._inbox.receive(wait)
                self._working_since = self._clock()
                for item in mail:
                    self._take(item)
                wait = self._step()
        except MailboxClosed:
            self._fail_all(EngineDead("the engine was closed"))
        finally:
            self._working_since = None
            if self._grammar is not None:
                self._grammar.close()
            self._runner.close()

    def _take(self, item: Any) -> None:
        match item:
            case TokenizedGenerateReqInput():
                self._add(item)
            case BatchTokenizedGenerateReqInput():
                for request in item.requests:
                    self._add(request)
            case AbortReq():
                self._scheduler.abort(None if item.abort_all else item.rid)
            case FlushCacheReq():
                self._control(item, self._flush)
            case GetStateReq():
                self._control(item, self._state)
            case _:
                raise InternalFault(f"the scheduler got mail it does not know: {type(item).__name__}")

    def _add(self, request: TokenizedGenerateReqInput) -> None:
        params = request.sampling_params
        self._begun.append(
            TextRequest(
                rid=request.rid,
                stop=params.stop,
                skip_special_tokens=params.skip_special_tokens,
                no_stop_trim=params.no_stop_trim,
                at_start=request.at_start,
                stream=request.stream,
                http_worker_ipc=request.http_worker_ipc,
            )
        )
        self._live.add(request.rid)
        try:
            self._scheduler.add(request)
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            self._scheduler.abort(request.rid)
            self._post([_failed(request.rid, _as_fault(error, "the request could not be taken in"))])

    def _step(self) -> float:
        """One step; how long to wait for mail before the next."""
        try:
            outputs = step(self._scheduler, self._runner)
        except Exception as error:
            # A defect: the requests in hand are answered with it. If it comes again and again, nothing works.
            self._faults += 1
            self._fail_all(_as_fault(error, "a step failed"))
            if self._faults >= MAX_FAULTS_IN_A_ROW:
                raise
            return 0.0
        if outputs:
            self._faults = 0
        self._post(outputs)
        if not self._scheduler.busy:
            return IDLE_S
        # Without news, either a step brought none (a part of a prompt), or all wait for their grammars.
        return 0.0 if outputs or self._scheduler.state()["running"] else BLOCKED_S

    def _fail_all(self, fault: RuntimeFault) -> None:
        """Answer every live request with `fault` and empty the scheduler."""
        outputs = [_failed(rid, fault) for rid in sorted(self._live)]
        self._scheduler.abort(None)
        self._scheduler.drain()
        self._post(outputs)

    def _post(self, outputs: Sequence[TokenOutput]) -> None:
        if not outputs and not self._begun:
            return
        begun, self._begun = self._begun, []
        for output in outputs:
            if output.finish is not None:
                self._live.discard(output.rid)
        self._outbox.send(
            BatchTokenIDOutput(rids=[output.rid for output in outputs], outputs=list(outputs), begun=begun)
        )

    def _control(
        self, request: FlushCacheReq | GetStateReq, act: Callable[[], tuple[bool, dict[str, Any]]]
    ) -> None:
        try:
            ok, data = act()
            message = ""
        except RuntimeFault as fault:
            ok, data, message = False, fault.to_dict(), str(fault)
        self._outbox.send(
            ControlOutput(
                rid=request.rid, http_worker_ipc=request.http_worker_ipc, ok=ok, message=message, data=data
            )
        )

    def _flush(self) -> tuple[bool, dict[str, Any]]:
        return self._scheduler.flush_cache(), {}

    def _state(self) -> tuple[bool, dict[str, Any]]:
        return True, self._scheduler.state()


def _failed(rid: str, fault: RuntimeFault) -> TokenOutput:
    return TokenOutput(rid=rid, new_ids=[], finish=FinishReason(type="abort", error=fault.to_dict()))


def _as_fault(error: Exception, what: str) -> RuntimeFault:
    if isinstance(error, RuntimeFault):
        return error
    return InternalFault(f"{what}: {type(error).__name__}: {error}", hint="a defect of the runtime")
