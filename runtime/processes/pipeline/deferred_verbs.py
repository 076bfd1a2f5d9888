"""Control verbs that are carried out later: when requests have ended, or compilations are done.

WeightUpdates loads other weights, MemoryRelease gives memory back, Precompiles compiles constraints ahead.
Nothing here waits: each is asked again after every step. One thread calls them; they know no mailbox.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, cast

from runtime.grammar.base import Matcher
from runtime.grammar.manager import GrammarManager
from runtime.plan import Runner, TextRunner
from runtime.protocol.control import (
    MAX_PRECOMPILED,
    MemoryPart,
    PauseMode,
    PrecompileReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    UpdateWeightsReq,
)
from runtime.protocol.errors import (
    BadRequest,
    DeadlineExceeded,
    InternalFault,
    NotReady,
    NotSupported,
    RuntimeFault,
    UnsupportedConstraint,
)
from runtime.protocol.request_base import SingleReq
from runtime.scheduler.embedding_scheduler import EmbeddingScheduler
from runtime.scheduler.scheduler import Scheduler

Data = dict[str, Any]
Answer = tuple[bool, str, Data]
"""ok, message and data of a ControlOutput."""
LOOK_S = 0.005
"""How often compilations are looked at while nothing else is to be done."""


class WeightUpdates:
    """Loads new weights once no step is under way. Running requests return to the queue and are computed
    again, with their output so far, under the new weights."""

    def __init__(
        self, scheduler: Scheduler | EmbeddingScheduler, runner: Runner | TextRunner, path: str | None = None
    ) -> None:
        """path: of the current weights; None: they are in no file."""
        self._scheduler, self._runner, self.path = scheduler, runner, path
        self._requests: list[UpdateWeightsReq] = []
        self._before: PauseMode | None = None  # how the scheduler was paused before the first of them

    def __bool__(self) -> bool:
        return bool(self._requests)

    def add(self, item: UpdateWeightsReq) -> None:
        """Raises NotSupported: the model is an encoder."""
        scheduler = self._scheduler
        if isinstance(scheduler, EmbeddingScheduler):
            raise NotSupported("an encoder's weights cannot be changed", where="model_path")
        if not self._requests:
            self._before = scheduler.paused
        self._requests.append(item)
        scheduler.pause("abort" if item.abort_all else "retract")

    def due(self, in_flight: bool) -> Iterator[UpdateWeightsReq]:
        """Those to make now; after them the scheduler goes on as before."""
        if not self._requests or in_flight or self._scheduler.running:
            return
        requests, self._requests = self._requests, []
        yield from requests
        if self._before is None:
            self._scheduler.resume()
        else:
            self._scheduler.pause(self._before)

    def make(self, item: UpdateWeightsReq) -> Answer:
        """Raises the runner's errors."""
        if not self._scheduler.flush_cache():
            raise InternalFault("some of the KV cache is still in use", where="model_path")
        cast(Runner, self._runner).update_weights(item.model_path)
        self.path = item.model_path
        return True, f"the weights are those of {item.model_path}", {}


class MemoryRelease:
    """Gives back the KV pool, the weights, or both, once running requests have ended, and allocates them
    again. asleep: new requests are refused. shared: other engines read the KV pool."""

    def __init__(
        self,
        scheduler: Scheduler | EmbeddingScheduler,
        runner: Runner | TextRunner,
        updates: WeightUpdates,
        clock: Callable[[], float],
        *,
        shared: bool,
    ) -> None:
        self._scheduler, self._runner, self._updates = scheduler, runner, updates
        self._clock, self._shared = clock, shared
        self._released: set[MemoryPart] = set()
        self._waiting: tuple[float, ReleaseMemoryReq] | None = None  # until when
        self.asleep = False

    def __bool__(self) -> bool:
        """Whether a request waits for others to end."""
        return self._waiting is not None

    @property
    def released(self) -> list[MemoryPart]:
        return sorted(self._released)

    def check_awake(self) -> None:
        """Raise NotReady if nothing can be computed, or soon cannot."""
        if self.asleep:
            parts = " and ".join(self.released) or "memory"
            raise NotReady(f"the model is asleep: its {parts} was given back", hint="POST /wake_up")

    def check_weights(self) -> None:
        """Raise BadRequest if there are no weights to change."""
        if "weights" in self._released:
            raise BadRequest(
                "the weights were given back", where="model_path", hint="POST /wake_up?tags=weights before"
            )

    def add(self, item: ReleaseMemoryReq) -> None:
        """Raises NotSupported, BadRequest."""
        scheduler = self._scheduler
        if isinstance(scheduler, EmbeddingScheduler):
            raise NotSupported("an encoder keeps its memory", where="tags")
        if self._shared:
            raise NotSupported("other engines read this one's KV cache", where="tags")
        if "weights" in item.parts and self._updates.path is None:
            raise BadRequest("random weights (load_format dummy) can be read nowhere again", where="tags")
        if self._waiting is not None:
            raise BadRequest("is being released already", where="tags")
        self._waiting, self.asleep = (self._clock() + max(0.0, item.timeout_s), item), True
        if item.abort:
            scheduler.abort(None, message="the model goes to sleep")

    def due(self, in_flight: bool) -> ReleaseMemoryReq | None:
        """The request to make now: nothing runs any more, or its time is up."""
        if self._waiting is None:
            return None
        until, item = self._waiting
        if self._scheduler.busy:
            return item if self._clock() >= until else None
        return None if in_flight else item

    def make(self, item: SingleReq) -> Answer:
        """Raises DeadlineExceeded, and the runner's errors."""
        try:
            match item:
                case ReleaseMemoryReq(parts=parts):
                    self._waiting = None
                    self._release(parts)
                case ResumeMemoryReq(parts=parts):
                    self._resume(parts)
        finally:
            self.asleep = bool(self._released) or self._waiting is not None
        return True, "", {"released": self.released}

    def _release(self, parts: tuple[MemoryPart, ...]) -> None:
        if self._scheduler.busy:
            raise DeadlineExceeded("requests are not finished", hint="wait longer, or abort them")
        if not self._scheduler.flush_cache():
            raise InternalFault("some of the KV cache is still in use", where="tags")
        cast(Runner, self._runner).release_memory(parts)
        self._released |= {*parts}

    def _resume(self, parts: tuple[MemoryPart, ...]) -> None:
        if self._waiting is not None:  # the release is answered as late
            self._waiting = self._clock(), self._waiting[1]
        # The weights first: the pool then takes the rest.
        for part in sorted({*parts} & self._released, reverse=True):
            cast(Runner, self._runner).restore_memory((part,), self._updates.path or "")
            self._released.discard(part)


class _Precompile(NamedTuple):
    request: PrecompileReq
    until: float
    futures: list[Future[Matcher]]


class Precompiles:
    """Constraints that are compiled before a request uses them."""

    def __init__(self, grammars: GrammarManager | None) -> None:
        self._grammars = grammars
        self._waiting: list[_Precompile] = []

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, request: PrecompileReq, now: float) -> None:
        """Raises BadRequest: too many at once, or a wrong deadline; UnsupportedConstraint: no grammar
        backend."""
        if self._grammars is None:
            raise UnsupportedConstraint("no grammar backend is loaded", where="constraints")
        if len(request.constraints) > MAX_PRECOMPILED:
            raise BadRequest(
                f"{len(request.constraints)} at once; at most {MAX_PRECOMPILED}", where="constraints"
            )
        if not 0 < request.timeout_s < float("inf"):
            raise BadRequest(
                f"must be a positive number of seconds, got {request.timeout_s}", where="timeout_s"
            )
        futures = [self._grammars.submit(constraint) for constraint in request.constraints]
        self._waiting.append(_Precompile(request, now + request.timeout_s, futures))

    def due(self, now: float) -> Iterator[tuple[PrecompileReq, Data]]:
        """Those that are compiled, or whose time is up, each once, with their answer."""
        for one in list(self._waiting):
            if now >= one.until or all(future.done() for future in one.futures):
                self._waiting.remove(one)
                yield one.request, {"constraints": [_outcome(future) for future in one.futures]}


def _outcome(future: Future[Matcher]) -> Data:
    """The answer about one constraint. A compilation that is not done goes on in the background."""
    try:
        origin = future.result(timeout=0).origin
    except RuntimeFault as fault:
        return {"ok": False, "error": fault.to_dict()}
    except (TimeoutError, CancelledError):
        late = DeadlineExceeded("not compiled yet; it goes on", where="timeout_s")
        return {"ok": False, "error": late.to_dict()}
    return {
        "ok": True,
        "backend": origin.backend,
        "exact": origin.exact,
        "checked": list(origin.checked),
        "ignored": list(origin.ignored),
        "why": origin.why,
        "compile_s": origin.compile_s,
        "cached": origin.cached,
    }
