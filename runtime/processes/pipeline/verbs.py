"""Verbs: carries out the control verbs in the scheduler's process, and answers each once.

A verb of runtime.protocol.control.VERBS is a method of the same name, here or of the runner. One that cannot
be carried out yet is looked at again after every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sized
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple, Protocol, cast

import msgspec

from runtime.cache.radix import NoCache
from runtime.grammar.base import Matcher
from runtime.grammar.manager import GrammarManager
from runtime.plan import Runner, TextRunner
from runtime.processes.pipeline.runner_process import RunnerProcess
from runtime.protocol import control
from runtime.protocol.control import (
    VERB_OF,
    ControlOutput,
    MemoryPart,
    PauseMode,
    PrecompileReq,
    UpdateWeightsReq,
    Verb,
    no_adapters,
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
from runtime.scheduler.requests.adapters import AdapterRegistry
from runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

Data = dict[str, Any]
Answer = tuple[bool, str, Data]
"""ok, message and data of a ControlOutput."""


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


class Waiting(NamedTuple):
    """A verb to carry out later. due: whether it can be now; its argument says whether a step has begun."""

    request: SingleReq
    due: Callable[[bool], bool]
    act: Callable[[], Data | Answer]


class Verbs:
    """reply: sends an answer. live: the live requests. path: of the model's weights, None if they are in no
    file. shared: other engines read the KV pool.

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
        self._path, self._shared = path, shared
        self._released: set[MemoryPart] = set()
        self._release_until: float | None = None  # a release waits for requests to end
        self.asleep = False
        """Whether new requests are refused, as memory was given back or soon will be."""
        self._paused_before: PauseMode | None = None  # how the scheduler was, before weights were changed
        self.waiting: list[Waiting] = []
        """Verbs to be answered by `answer_due`."""
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

    def answer_due(self, in_flight: bool) -> None:
        """Carry out the waiting verbs that can be now. in_flight: the next step has begun."""
        for one in list(self.waiting):
            if one.due(in_flight):
                self.waiting.remove(one)
                self._answer(one.request, one.act)

    def waits_for(self, kind: type[SingleReq]) -> bool:
        """Whether a verb of this kind waits."""
        return any(isinstance(one.request, kind) for one in self.waiting)

    def check_awake(self) -> None:
        """Raise NotReady if nothing can be computed, or soon cannot."""
        if self.asleep:
            parts = " and ".join(sorted(self._released)) or "memory"
            raise NotReady(f"the model is asleep: its {parts} was given back", hint="POST /wake_up")

    # -- the verbs -------------------------------------------------------------------------------------------

    def flush_cache(self, request: control.FlushCacheReq) -> None:
        until = self._clock() + max(0.0, request.timeout_s)
        self.waiting.append(
            Waiting(request, lambda _: not self._scheduler.busy or self._clock() >= until, self._flush)
        )

    def pause(self, request: control.PauseReq) -> Data:
        self._scheduler.pause(request.mode)
        return {"paused": request.mode}

    def resume(self, _: control.ContinueReq) -> Data:
        self._scheduler.resume()
        return {"paused": None}

    def open_session(self, request: control.OpenSessionReq) -> Data:
        opened = self._scheduler.open_session(
            request.session_id, request.capacity, request.timeout_s,
            streaming=request.streaming, owner=request.owner,
        )  # fmt: skip
        return {"session_id": opened}

    def close_session(self, request: control.CloseSessionReq) -> Data:
        self._scheduler.close_session(request.session_id, request.owner)
        return {"session_id": request.session_id}

    def state(self, _: control.GetStateReq) -> Data:
        return {
            **self._scheduler.state(),
            **self._grammar_state(),
            "live": len(self._live),
            "faults_in_a_row": self.faults,
            "released": sorted(self._released),
        }

    def prefixes(self, request: control.GetPrefixesReq) -> Data:
        return surveyed(self._scheduler, request)

    def set_state(self, request: control.SetStateReq) -> Data:
        return self._scheduler.tune(request.values)

    def precompile(self, request: PrecompileReq) -> None:
        if self._grammar is None:
            raise UnsupportedConstraint("no grammar backend is loaded", where="constraints")
        count, seconds = len(request.constraints), request.timeout_s
        if count > control.MAX_PRECOMPILED:
            raise BadRequest(f"{count} at once; at most {control.MAX_PRECOMPILED}", where="constraints")
        if not 0 < seconds < float("inf"):
            raise BadRequest(f"must be a positive number of seconds, got {seconds}", where="timeout_s")
        futures = [self._grammar.submit(constraint) for constraint in request.constraints]
        until = self._clock() + seconds
        one = Waiting(
            request,
            lambda _: self._clock() >= until or all(future.done() for future in futures),
            lambda: {"constraints": [_outcome(future) for future in futures]},
        )
        self.waiting.append(one)

    def profile(self, request: control.ProfileReq) -> Data:
        if self._profiler is None:
            raise BadRequest("this engine has no profiler", where="profile")
        if request.action == "start":
            return self._profiler.start(request.folder, request.steps)
        return self._profiler.stop()

    def load_lora_adapter(self, request: control.LoadLoRAAdapterReq) -> Data:
        """No step is made meanwhile."""
        adapters = self._adapters()
        adapters.load(request.lora_name, request.lora_path, pinned=request.pinned)
        return {"loaded_adapters": adapters.loaded}

    def unload_lora_adapter(self, request: control.UnloadLoRAAdapterReq) -> Data:
        adapters = self._adapters()
        adapters.unload(request.lora_name)
        return {"loaded_adapters": adapters.loaded}

    def update_weights_from_disk(self, request: UpdateWeightsReq) -> None:
        """Once no step is under way. Running requests are computed again, and keep their output."""
        if "weights" in self._released:
            raise BadRequest(
                "the weights were given back", where="model_path", hint="POST /wake_up?tags=weights before"
            )
        scheduler = self._scheduler
        if isinstance(scheduler, EmbeddingScheduler):
            raise NotSupported("an encoder's weights cannot be changed", where="model_path")
        if not self.waits_for(UpdateWeightsReq):
            self._paused_before = scheduler.paused
        scheduler.pause("abort" if request.abort_all else "retract")
        act = partial(self._update, request.model_path)
        self.waiting.append(Waiting(request, lambda in_flight: not (in_flight or scheduler.running), act))

    def release_memory_occupation(self, request: control.ReleaseMemoryReq) -> None:
        scheduler = self._scheduler
        if isinstance(scheduler, EmbeddingScheduler):
            raise NotSupported("an encoder keeps its memory", where="tags")
        if self._shared:
            raise NotSupported("other engines read this one's KV cache", where="tags")
        if "weights" in request.parts and self._path is None:
            raise BadRequest("random weights (load_format dummy) can be read nowhere again", where="tags")
        if self._release_until is not None:
            raise BadRequest("is being released already", where="tags")
        self._release_until, self.asleep = self._clock() + max(0.0, request.timeout_s), True
        if request.abort:
            scheduler.abort(None, message="the model goes to sleep")
        self.waiting.append(Waiting(request, self._can_release, partial(self._release, request.parts)))

    def resume_memory_occupation(self, request: control.ResumeMemoryReq) -> Data:
        if self._release_until is not None:  # the release is answered as late
            self._release_until = self._clock()
        # The weights first: the pool then takes the rest.
        for part in sorted({*request.parts} & self._released, reverse=True):
            cast(Runner, self._runner).restore_memory((part,), self._path or "")
            self._released.discard(part)
        self.asleep = bool(self._released) or self._release_until is not None
        return {"released": sorted(self._released)}

    def health(self, _: control.HealthReq) -> Data:
        paused, released = self._scheduler.paused, sorted(self._released)
        return {"live": len(self._live), "paused": paused, "released": released}

    # -- when a verb is due ----------------------------------------------------------------------------------

    def _flush(self) -> Answer:
        if self._scheduler.busy:
            count = len(self._live)
            left = f"{count} request{'s are' if count != 1 else ' is'} not finished"
            return False, f"the cache was not flushed: {left}", {"live": count}
        done = self._scheduler.flush_cache()
        if self._grammar is not None:
            self._grammar.flush()
        return done, "" if done else "some of the cache is still in use", {}

    def _update(self, path: str) -> Answer:
        try:
            if not self._scheduler.flush_cache():
                raise InternalFault("some of the KV cache is still in use", where="model_path")
            cast(Runner, self._runner).update_weights(path)
            self._path = path
        finally:
            if not self.waits_for(UpdateWeightsReq):
                if self._paused_before is None:
                    self._scheduler.resume()
                else:
                    self._scheduler.pause(self._paused_before)
        return True, f"the weights are those of {path}", {}

    def _can_release(self, in_flight: bool) -> bool:
        """Nothing runs any more, or the time is up."""
        if self._scheduler.busy:
            return self._release_until is not None and self._clock() >= self._release_until
        return not in_flight

    def _release(self, parts: tuple[MemoryPart, ...]) -> Data:
        self._release_until, self.asleep = None, bool(self._released)
        if self._scheduler.busy:
            raise DeadlineExceeded("requests are not finished", hint="wait longer, or abort them")
        if not self._scheduler.flush_cache():
            raise InternalFault("some of the KV cache is still in use", where="tags")
        cast(Runner, self._runner).release_memory(parts)
        self._released |= {*parts}
        self.asleep = True
        return {"released": sorted(self._released)}

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
        except Exception as error:
            if not isinstance(error, RuntimeFault):
                log.exception("%s failed", type(request).__name__)
            fault = as_fault(error, type(request).__name__)
            answer = (False, str(fault), fault.to_dict())
        if answer is not None:
            self._reply(request, (True, "", answer) if isinstance(answer, dict) else answer)

    def _reply(self, request: SingleReq, answer: Answer) -> None:
        ok, message, data = answer
        self._send(
            ControlOutput(
                rid=request.rid, http_worker_ipc=request.http_worker_ipc, ok=ok, message=message, data=data
            )
        )

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
    return InternalFault.of(error, what, hint="a defect of the runtime")


def surveyed(scheduler: Scheduler | EmbeddingScheduler, request: control.GetPrefixesReq) -> Data:
    """A PrefixTree as data, within the limits. Encoders have no cache."""
    match scheduler:
        case Scheduler(manager=manager):
            cache = manager.cache
        case EmbeddingScheduler():
            cache = NoCache()
    most, ids = min(request.most, control.MAX_PREFIXES), min(request.ids, control.MAX_PREFIX_IDS)
    tree = cache.survey(max(0, most), max(0, ids))
    data: Data = msgspec.to_builtins(tree)
    return data


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
