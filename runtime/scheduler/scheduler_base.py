"""SchedulerBase: what every scheduler does with its requests besides computing them. It counts and answers
them, ends those that are cancelled or late, pauses, and takes new settings.

Scheduler (generations) and EmbeddingScheduler (texts for an encoder) extend it. Knows no slots and no plans.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic

from runtime.config.scheduler import TUNABLE, SchedulerConfig
from runtime.protocol.control import PauseMode
from runtime.protocol.errors import Aborted, DeadlineExceeded, RuntimeFault
from runtime.protocol.io_struct import (
    FinishReason,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from runtime.scheduler.requests.request import R, Request, failure

RATE_S = 1.0  # seconds a rate is measured over, at least
_Entry = tuple[float, int, str]  # (when, seq, rid)


@dataclass(slots=True)
class Counters:
    """Totals since the start. Tokens and jumps of live requests are added when they end."""

    requests: int = 0
    steps: int = 0
    computed: int = 0
    prompt_tokens: int = 0
    cached: int = 0
    generated: int = 0
    jumped: int = 0
    rolled_back: int = 0
    retracted: int = 0
    preempted: int = 0
    finished: int = 0
    failed: int = 0
    aborted: int = 0
    timed_out: int = 0
    repairs: int = 0

    def state(self, generated: int = 0, jumped: int = 0) -> dict[str, Any]:
        """By the names of Scheduler.state(). `generated`, `jumped`: of live requests, to be added."""
        return {
            "steps": self.steps,
            "computed": self.computed,
            "cached": self.cached,
            "generated": self.generated + generated,
            "jumped": self.jumped + jumped,
            "retractions": self.retracted,
            "preemptions": self.preempted,
            "finished": self.finished,
            "failed": self.failed,
            "repairs": self.repairs,
            "num_requests_total": self.requests,
            "num_aborted_requests_total": self.aborted,
            "num_timed_out_requests_total": self.timed_out,
            "num_retractions_total": self.retracted,
            "num_preemptions_total": self.preempted,
            "num_repairs_total": self.repairs,
            "prompt_tokens_total": self.prompt_tokens,
            "generation_tokens_total": self.generated + generated,
            "cached_tokens_total": self.cached,
            "computed_tokens_total": self.computed,
            "jumped_tokens_total": self.jumped + jumped,
            "num_grammar_rollbacks_total": self.rolled_back,
            "cache_hit_rate": self.cached / self.prompt_tokens if self.prompt_tokens else 0.0,
        }


class Rate:
    """Tokens per second, measured anew after RATE_S at least."""

    def __init__(self, now: float) -> None:
        self.value = 0.0
        self._at, self._total = now, 0

    def look(self, generated: int, live: Collection[Request], now: float) -> None:
        """`generated`: tokens of requests that have ended; `live`: the others."""
        passed = now - self._at
        if passed >= RATE_S:
            total = generated + sum([request.produced for request in live])
            self.value = (total - self._total) / passed
            self._at, self._total = now, total


class Deadlines(Generic[R]):
    """Which requests are late. A request brings the time that it has left, which passes in any case; the
    limits on queueing and running count only while the scheduler is not paused.

    Times are seconds of the scheduler's clock. `queue_s`: from a request's arrival to its first admission;
    `running_s`: from there to its end; None: no limit."""

    def __init__(self, queue_s: float | None, running_s: float | None) -> None:
        self._queue_s, self._running_s = queue_s, running_s
        self._by_request: list[_Entry] = []
        self._queued: list[_Entry] = []
        self._running: list[_Entry] = []
        self._paused_s = 0.0  # how long the scheduler was paused in all
        self._paused_at: float | None = None

    def came(self, request: R, now: float) -> None:
        if request.source.time_left_s is not None:
            heapq.heappush(self._by_request, (now + request.source.time_left_s, request.seq, request.rid))
        if self._queue_s is not None:
            when = self._counted(now) + self._queue_s
            heapq.heappush(self._queued, (when, request.seq, request.rid))

    def admitted(self, request: R, now: float) -> None:
        """For the first time."""
        if self._running_s is not None:
            when = self._counted(now) + self._running_s
            heapq.heappush(self._running, (when, request.seq, request.rid))

    def pause(self, now: float) -> None:
        if self._paused_at is None:
            self._paused_at = now

    def resume(self, now: float) -> None:
        if self._paused_at is not None:
            self._paused_s += now - self._paused_at
            self._paused_at = None

    def due(self, now: float, live: Mapping[str, R]) -> Iterator[tuple[R, DeadlineExceeded]]:
        """The live requests whose time is over by `now`, each once, with their error."""
        if not (self._by_request or self._queued or self._running):
            return
        counted = self._counted(now)
        for heap, at, what in (
            (self._by_request, now, "not finished in the time it was given"),
            (self._queued, counted, f"not let in within {self._queue_s} s"),
            (self._running, counted, f"not finished within {self._running_s} s of running"),
        ):
            while heap and heap[0][0] <= at:
                _, seq, rid = heapq.heappop(heap)
                request = live.get(rid)
                if request is None or request.seq != seq or (heap is self._queued and request.cached >= 0):
                    continue
                since = f"{now - request.timing.added_at:.1f} s after it came"
                text = f"{what}: {since}{request.progress}"
                hint = "try again later" if request.cached < 0 else "allow more time, or ask for fewer tokens"
                yield request, DeadlineExceeded(text, where=rid, hint=hint)

    def _counted(self, now: float) -> float:
        return (now if self._paused_at is None else self._paused_at) - self._paused_s


class Outbox:
    """Outputs until drain(). Building them costs as much as computing the tokens, so it is put off until the
    next step is under way. `pieces`: plain requests that stream and have one more token; appended to
    directly, for each token."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._answers: list[TokenOutput] = []
        self._due: list[tuple[Request, FinishReason | None]] = []
        self.pieces: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._answers or self._due or self.pieces)

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
        self._due.append((request, finish))

    def drain(self) -> list[TokenOutput]:
        """All of it, each once."""
        outputs, self._answers = self._answers, []
        if self.pieces:
            pieces, self.pieces = self.pieces, []
            outputs += [piece for request in pieces if (piece := request.piece()) is not None]
        if self._due:
            due, self._due = self._due, []
            now = self._clock()
            outputs += [one for request, end in due if (one := request.output(now, end)) is not None]
        return outputs


class SchedulerBase(ABC, Generic[R]):
    """`clock`: seconds. tunable: settings that may change while requests run. paused: how, or None."""

    tunable: ClassVar[tuple[str, ...]] = TUNABLE

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        self.config, self._clock = config, clock
        self._live: dict[str, R] = {}
        self._counters = Counters()
        self._deadlines: Deadlines[R] = Deadlines(config.queue_timeout_s, config.running_timeout_s)
        self._outbox = Outbox(clock)
        self.paused: PauseMode | None = None

    @abstractmethod
    def _close(self, request: R, reason: FinishReason, *, keep: bool) -> None:
        """Free what it holds, and answer it. `keep`: what was computed is right and may stay cached."""

    def _fail(self, request: R, fault: RuntimeFault, *, keep: bool = True) -> None:
        """Answer with an error and free everything."""
        self._counters.failed += 1
        self._counters.aborted += type(fault) is Aborted
        self._counters.timed_out += type(fault) is DeadlineExceeded
        self._close(request, failure(fault), keep=keep)

    def abort(self, rid: str | None, *, prefix: bool = False, message: str | None = None) -> int:
        """Cancel the request `rid`, all whose ids begin with it (`prefix`; an empty one names none), or all
        requests (None), waiting or running; unknown ones have finished already. `message`: their error. Their
        slots are freed at once, or at the commit of the step they are part of. Returns how many that are."""
        if rid is None:
            requests = list(self._live.values())
        elif prefix:
            requests = [one for one in self._live.values() if rid and one.rid.startswith(rid)]
        else:
            requests = [self._live[rid]] if rid in self._live else []
        for request in requests:
            self._fail(request, Aborted(message or "the request was cancelled", where=request.rid))
        return len(requests)

    def give_up(self, fault: RuntimeFault) -> list[TokenOutput]:
        """Every request ends with `fault`; returns drain(). No result may follow."""
        for request in list(self._live.values()):
            self._fail(request, fault, keep=False)
        return self.drain()

    def drain(self) -> list[TokenOutput]:
        """Outputs not fetched yet, each once: those of the last step, and of requests that were rejected,
        aborted, timed out or ended without a step. To be called before the next commit()."""
        return self._outbox.drain()

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished, or any output not fetched."""
        return bool(self._live or self._outbox)

    def pause(self, mode: PauseMode) -> None:
        """Start nothing until resume(). "abort" cancels all requests; otherwise they wait. Requests that come
        meanwhile wait (their deadlines hold; time on the clocks of queue_timeout_s and running_timeout_s
        stands still)."""
        self.paused = mode
        self._deadlines.pause(self._clock())
        if mode == "abort":
            self.abort(None, message="generation was paused")

    def resume(self) -> None:
        """Go on after pause(). Nothing happens when not paused."""
        self.paused = None
        self._deadlines.resume(self._clock())

    def tune(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Change settings while running (those of `tunable`); their values now. Raises BadRequest, and
        changes nothing, for an unknown name or a bad value."""
        self.config = self.config.tuned(values, self.tunable)
        return {name: getattr(self.config, name) for name in self.tunable}
