"""Verbs: carries out the control verbs in the scheduler's process, and answers each once.

A verb of runtime.protocol.control.VERBS with `by="scheduler"` is a method of its name here. One with
`by="runner"` is a method of the runner. Knows no mailbox.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from functools import partial
from typing import Any, Protocol

import msgspec

from runtime.cache.prefix_cache import NoCache
from runtime.grammar.manager import GrammarManager
from runtime.plan import Runner, TextRunner
from runtime.processes.pipeline.memory_release import MemoryRelease
from runtime.processes.pipeline.outputs import as_fault
from runtime.processes.pipeline.precompile import Precompiles
from runtime.processes.pipeline.runner_process import RunnerProcess
from runtime.processes.pipeline.weight_updates import WeightUpdates
from runtime.protocol.adapters import no_adapters
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
)
from runtime.protocol.errors import BadRequest, NotSupported, RuntimeFault
from runtime.protocol.request_base import SingleReq
from runtime.scheduler.embedding_scheduler import EmbeddingScheduler
from runtime.scheduler.requests.adapters import AdapterRegistry
from runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

Data = dict[str, Any]
Answer = tuple[bool, str, Data]
"""ok, message and data of a ControlOutput."""


class Profiler(Protocol):
    """Records where time goes. recording: in this process, now."""

    recording: bool

    def start(self, folder: str | None, steps: int | None) -> Data:
        """Raises BadRequest: one runs already, or the folder cannot be written to."""
        ...

    def stop(self) -> Data:
        """Raises BadRequest when none runs."""
        ...

    def stepped(self) -> None:
        """A step was made."""
        ...

    def close(self) -> None:
        """The engine ends. A profile being recorded in this process is written."""
        ...


class Verbs:
    """reply: sends an answer. live: the requests in hand. path: of the model's weights, None if they are in
    no file. shared: other engines read the KV pool.

    Each verb takes its request and returns the answer's data, or the whole answer; None means that the answer
    comes later, from `answer_due`. Raising a RuntimeFault answers with that.
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
        self._memory = MemoryRelease(scheduler, runner, self._updates, clock, shared=shared)
        self._precompiles = Precompiles(grammar)
        self.faults = 0
        """Steps that failed one after another."""

    def take(self, request: SingleReq) -> None:
        """Carry out one verb, or begin to."""
        verb = VERB_OF.get(type(request))
        if verb is None:
            fault = BadRequest(f"the scheduler does not know {type(request).__name__}", where="type")
            self._reply(request, (False, str(fault), fault.to_dict()))
        elif verb.by == "runner":
            self._answer(request, partial(self._on_runner, verb, request))
        else:
            self._answer(request, partial(getattr(self, verb.name), request))

    def answer_due(self, in_flight: bool) -> None:
        """After each step: carry out and answer what waited and can be done now. in_flight: whether the next
        step has begun."""
        self._flush_due()
        for update in self._updates.due(in_flight):
            self._answer(update, partial(self._updates.make, update))
        if (release := self._memory.due(in_flight)) is not None:
            self._answer(release, partial(self._memory.make, release))
        for asked, data in self._precompiles.due(self._clock()):
            self._reply(asked, (True, "", data))

    @property
    def compiling(self) -> bool:
        """Whether someone waits for compilations, which are looked at again and again."""
        return bool(self._precompiles)

    def check_awake(self) -> None:
        """Raise NotReady while memory is released."""
        self._memory.check_awake()

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
            "released": self._memory.released,
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
        self._memory.check_weights()
        self._updates.add(request)

    def release_memory_occupation(self, request: ReleaseMemoryReq) -> None:
        self._memory.add(request)

    def resume_memory_occupation(self, request: ResumeMemoryReq) -> Answer:
        return self._memory.make(request)

    def health(self, _: HealthReq) -> Data:
        paused, released = self._scheduler.paused, self._memory.released
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
        """Flush for the requests whose time is up, or for all of them once nothing runs."""
        if not self._flushes:
            return
        now, busy = self._clock(), self._scheduler.busy
        waiting = self._flushes if busy else []
        due = [request for until, request in self._flushes if not busy or until <= now]
        self._flushes = [(until, request) for until, request in waiting if until > now]
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


def surveyed(scheduler: Scheduler | EmbeddingScheduler, asked: GetPrefixesReq) -> dict[str, Any]:
    """A PrefixTree as data; no more of it than the limits, whoever asks. Vectors are made without a cache."""
    match scheduler:
        case Scheduler(manager=manager):
            cache = manager.cache
        case EmbeddingScheduler():
            cache = NoCache()
    tree = cache.survey(min(max(0, asked.most), MAX_PREFIXES), min(max(0, asked.ids), MAX_PREFIX_IDS))
    data: dict[str, Any] = msgspec.to_builtins(tree)
    return data
