"""Verbs: carries out the control verbs in the scheduler's process, and answers each once.

A verb of runtime.protocol.control.VERBS with `by="scheduler"` is a method of the same name here, one with
`by="runner"` a method of the runner. Knows no mailbox.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from functools import partial
from typing import Protocol

import msgspec

from runtime.cache.radix import NoCache
from runtime.grammar.manager import GrammarManager
from runtime.plan import Runner, TextRunner
from runtime.processes.pipeline.deferred_verbs import (
    Answer,
    Data,
    MemoryRelease,
    Precompiles,
    WeightUpdates,
)
from runtime.processes.pipeline.runner_process import RunnerProcess
from runtime.protocol.control import (
    MAX_PREFIX_IDS,
    MAX_PREFIXES,
    VERB_OF,
    CloseSessionReq,
    ContinueReq,
    ControlOutput,
    FlushCacheReq,
    GetPrefixesReq,
    GetStateReq,
    HealthReq,
    LoadLoRAAdapterReq,
    OpenSessionReq,
    PauseReq,
    PrecompileReq,
    ProfileReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    SetStateReq,
    UnloadLoRAAdapterReq,
    UpdateWeightsReq,
    Verb,
    no_adapters,
)
from runtime.protocol.errors import BadRequest, InternalFault, NotSupported, RuntimeFault
from runtime.protocol.request_base import SingleReq
from runtime.scheduler.embedding_scheduler import EmbeddingScheduler
from runtime.scheduler.requests.adapters import AdapterRegistry
from runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


class Profiler(Protocol):
    """Records how long the parts of a step take. recording: whether it does now, in this process."""

    recording: bool

    def start(self, folder: str | None, steps: int | None) -> Data:
        """Raises BadRequest: one is recorded already, or the folder cannot be written to."""

    def stop(self) -> Data:
        """Raises BadRequest if none is recorded."""

    def stepped(self) -> None:
        """A step has ended."""

    def close(self) -> None:
        """Write a profile that is being recorded in this process."""


class Verbs:
    """reply: sends an answer. live: the live requests. path: of the model's weights, None if they are in no
    file. shared: other engines read the KV pool. waiting: some verb is to be answered by `answer_due`.

    Each verb takes its request and returns the answer's data, or the whole answer; None: it is answered
    later. A RuntimeFault that it raises is the answer.
    """

    def __init__(
        self,
        scheduler: Scheduler | EmbeddingScheduler,
        runner: Runner | TextRunner,
        grammar: GrammarManager | None,
        reply: Callable[[ControlOutput], None],
        clock: Callable[[], float],
        live: Sized,
        *,
        profiler: Profiler | None = None,
        path: str | None = None,
        shared: bool = False,
    ) -> None:
        self._scheduler, self._runner, self._grammar = scheduler, runner, grammar
        self._send, self._clock, self._live, self._profiler = reply, clock, live, profiler
        self._flushes: list[tuple[float, FlushCacheReq]] = []  # (until when, request), waiting for idleness
        self._updates = WeightUpdates(scheduler, runner, path)
        self.memory = MemoryRelease(scheduler, runner, self._updates, clock, shared=shared)
        self._precompiles = Precompiles(grammar)
        self.waiting = False
        self.faults = 0
        """Consecutive steps that failed."""

    def take(self, request: SingleReq) -> None:
        """Carry out a verb, or register it for later."""
        verb = VERB_OF.get(type(request))
        if verb is None:
            fault = BadRequest(f"the scheduler does not know {type(request).__name__}", where="type")
            self._reply(request, (False, str(fault), fault.to_dict()))
        elif verb.by == "runner":
            self._answer(request, partial(self._on_runner, verb, request))
        else:
            self._answer(request, partial(getattr(self, verb.name), request))
            self._look_for_waiting()

    def answer_due(self, in_flight: bool) -> None:
        """After a step: carry out and answer the waiting verbs that can be carried out now. in_flight:
        whether the next step has begun."""
        self._flush_due()
        for update in self._updates.due(in_flight):
            self._answer(update, partial(self._updates.make, update))
        if (release := self.memory.due(in_flight)) is not None:
            self._answer(release, partial(self.memory.make, release))
        for precompile, data in self._precompiles.due(self._clock()):
            self._reply(precompile, (True, "", data))
        self._look_for_waiting()

    def _look_for_waiting(self) -> None:
        self.waiting = bool(self._flushes or self._updates or self.memory or self._precompiles)

    @property
    def compiling(self) -> bool:
        """Whether a request waits for compilations."""
        return bool(self._precompiles)

    # -- the verbs -------------------------------------------------------------------------------------------

    def flush_cache(self, request: FlushCacheReq) -> None:
        self._flushes.append((self._clock() + max(0.0, request.timeout_s), request))

    def pause(self, request: PauseReq) -> Data:
        self._scheduler.pause(request.mode)
        return {"paused": request.mode}

    def resume(self, _: ContinueReq) -> Data:
        self._scheduler.resume()
        return {"paused": None}

    def open_session(self, request: OpenSessionReq) -> Data:
        opened = self._scheduler.open_session(
            request.session_id, request.capacity, request.timeout_s,
            streaming=request.streaming, owner=request.owner,
        )  # fmt: skip
        return {"session_id": opened}

    def close_session(self, request: CloseSessionReq) -> Data:
        self._scheduler.close_session(request.session_id, request.owner)
        return {"session_id": request.session_id}

    def state(self, _: GetStateReq) -> Data:
        return {
            **self._scheduler.state(),
            **self._grammar_state(),
            "live": len(self._live),
            "faults_in_a_row": self.faults,
            "released": self.memory.released,
        }

    def prefixes(self, request: GetPrefixesReq) -> Data:
        return surveyed(self._scheduler, request)

    def set_state(self, request: SetStateReq) -> Data:
        return self._scheduler.tune(request.values)

    def precompile(self, request: PrecompileReq) -> None:
        self._precompiles.add(request, self._clock())

    def profile(self, request: ProfileReq) -> Data:
        if self._profiler is None:
            raise BadRequest("this engine has no profiler", where="profile")
        if request.action == "start":
            return self._profiler.start(request.folder, request.steps)
        return self._profiler.stop()

    def load_lora_adapter(self, request: LoadLoRAAdapterReq) -> Data:
        """No step is made meanwhile."""
        adapters = self._adapters()
        adapters.load(request.lora_name, request.lora_path, pinned=request.pinned)
        return {"loaded_adapters": adapters.loaded}

    def unload_lora_adapter(self, request: UnloadLoRAAdapterReq) -> Data:
        adapters = self._adapters()
        adapters.unload(request.lora_name)
        return {"loaded_adapters": adapters.loaded}

    def update_weights_from_disk(self, request: UpdateWeightsReq) -> None:
        self.memory.check_weights()
        self._updates.add(request)

    def release_memory_occupation(self, request: ReleaseMemoryReq) -> None:
        self.memory.add(request)

    def resume_memory_occupation(self, request: ResumeMemoryReq) -> Answer:
        return self.memory.make(request)

    def health(self, _: HealthReq) -> Data:
        paused, released = self._scheduler.paused, self.memory.released
        return {"live": len(self._live), "paused": paused, "released": released}

    # -- within ----------------------------------------------------------------------------------------------

    def _on_runner(self, verb: Verb, request: SingleReq) -> Data:
        if isinstance(self._runner, RunnerProcess):
            return self._runner.call(verb.name, request)
        act = getattr(self._runner, verb.name, None)
        if act is None:
            raise NotSupported(f"this model's runner has no {verb.name}", where=verb.name)
        data: Data = act(request) or {}
        return data

    def _answer(self, request: SingleReq, act: Callable[[], Data | Answer | None]) -> None:
        try:
            answer = act()
        except RuntimeFault as fault:
            answer = (False, str(fault), fault.to_dict())
        except Exception as error:
            log.exception("%s failed", type(request).__name__)
            defect = as_fault(error, type(request).__name__)
            answer = (False, str(defect), defect.to_dict())
        if answer is not None:
            self._reply(request, (True, "", answer) if isinstance(answer, dict) else answer)

    def _reply(self, request: SingleReq, answer: Answer) -> None:
        ok, message, data = answer
        self._send(
            ControlOutput(
                rid=request.rid, http_worker_ipc=request.http_worker_ipc, ok=ok, message=message, data=data
            )
        )

    def _flush_due(self) -> None:
        """Flush for the requests whose time is up; for all of them if nothing runs."""
        now, busy = self._clock(), self._scheduler.busy
        due = [request for until, request in self._flushes if not busy or until <= now]
        self._flushes = [one for one in self._flushes if busy and one[0] > now]
        for request in due:
            self._answer(request, self._flush)

    def _flush(self) -> Answer:
        if self._scheduler.busy:
            count = len(self._live)
            left = f"{count} request{'s are' if count != 1 else ' is'} not finished"
            return False, f"the cache was not flushed: {left}", {"live": count}
        done = self._scheduler.flush_cache()
        if self._grammar is not None:
            self._grammar.flush()
        return done, "" if done else "some of the cache is still in use", {}

    def _adapters(self) -> AdapterRegistry:
        match self._scheduler:
            case Scheduler(adapters=adapters):
                return adapters
            case EmbeddingScheduler():
                raise no_adapters("lora_name")

    def _grammar_state(self) -> Data:
        if self._grammar is None:
            return {}
        state = self._grammar.state()
        return {
            "num_grammar_kept": state["cached"],
            "num_grammar_total": state["hits"] + state["misses"],
            "num_grammar_cache_hit_total": state["hits"],
            "num_grammar_cache_miss_total": state["misses"],
            "num_grammar_timeout_total": state["timeouts"],
            "num_grammar_refused_total": state["refused"],
            "num_grammar_compiling": state["compiling"],
            "num_grammar_stuck": state["stuck"],
            "grammar_kept_bytes": state["cached_bytes"],
            "grammar_compile_seconds": state["seconds"],
        }


def as_fault(error: Exception, what: str) -> RuntimeFault:
    if isinstance(error, RuntimeFault):
        return error
    return InternalFault(f"{what}: {type(error).__name__}: {error}", hint="a defect of the runtime")


def surveyed(scheduler: Scheduler | EmbeddingScheduler, request: GetPrefixesReq) -> Data:
    """A PrefixTree as data, within the limits. Encoders have no cache."""
    match scheduler:
        case Scheduler(manager=manager):
            cache = manager.cache
        case EmbeddingScheduler():
            cache = NoCache()
    tree = cache.survey(min(max(0, request.most), MAX_PREFIXES), min(max(0, request.ids), MAX_PREFIX_IDS))
    data: Data = msgspec.to_builtins(tree)
    return data
