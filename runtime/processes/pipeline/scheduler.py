"""SchedulerProcess: joins control and compute. One thread owns the scheduler, the runner and the grammars.

Takes requests from a mailbox, steps, and posts output deltas to another. What goes wrong with one request
ends that request; what goes wrong with a step ends the requests that were running; only when even that fails
does the process end, and then its cause is in `run`'s exception.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import msgspec

from runtime.grammar.manager import GrammarManager
from runtime.ipc.mailbox import Inbox, MailboxClosed, Outbox
from runtime.plan import Runner, TextRunner
from runtime.processes.pipeline.memory_release import MemoryRelease
from runtime.processes.pipeline.posts import as_fault, batch, failed, vector_batch
from runtime.processes.pipeline.precompile import LOOK_S, Precompiles
from runtime.processes.pipeline.prefixes import surveyed
from runtime.processes.pipeline.vectors import Vectors, failed_vector, loop_of
from runtime.processes.pipeline.weight_updates import WeightUpdates
from runtime.protocol.adapters import no_adapters
from runtime.protocol.errors import BadRequest, EngineDead, RuntimeFault, WireError
from runtime.protocol.io_struct import (
    AbortReq,
    BatchStrOutput,
    BatchTokenizedGenerateReqInput,
    CloseSessionReq,
    ContinueReq,
    ControlOutput,
    EmbeddingOutput,
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
    SingleReq,
    StrOutput,
    TextRequest,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
    UnloadLoRAAdapterReq,
    UpdateWeightsReq,
)
from runtime.scheduler.embedding import EmbeddingScheduler
from runtime.scheduler.requests.adapters import AdapterRegistry
from runtime.scheduler.requests.request import failure
from runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

IDLE_S = 5.0
"""How long one wait for mail lasts; a new one follows."""
BLOCKED_S = 0.001
"""How long to wait for mail while requests wait for something other than a step (their grammar)."""
AWAITED_S = 0.016
"""The same while only other engines are waited for, after a while."""
PAUSED_S = 0.05
"""The same while generation is paused, or a flush waits for requests to end."""
LOST_S = 0.5
"""How long it may take until it is noticed that the runner is lost."""
MAX_FAULTS_IN_A_ROW = 3

Answer = tuple[bool, str, dict[str, Any]]


class Profiler(Protocol):
    """Writes down where time goes."""

    def start(self, folder: str | None, steps: int | None) -> dict[str, Any]:
        """Raises BadRequest: one runs already, or the folder cannot be written to."""
        ...

    def stop(self) -> dict[str, Any]:
        """Raises BadRequest when none runs."""
        ...

    def stepped(self) -> None:
        """A step was made."""
        ...

    def close(self) -> None:
        """The engine ends; so does a profile that is being made: in this process it is written."""
        ...


class Closing(Protocol):
    """What is to be closed with the process, before the runner is."""

    def close(self) -> None: ...


class SchedulerProcess:
    """`run()` until the inbox is closed. Other threads may read `stalled_s`, and say why they close it in
    `closed_because`."""

    def __init__(
        self,
        scheduler: Scheduler | EmbeddingScheduler,
        runner: Runner | TextRunner,
        grammar: GrammarManager | None,
        inbox: Inbox,
        outbox: Outbox,
        clock: Callable[[], float] = time.monotonic,
        profiler: Profiler | None = None,
        vectors: Vectors | None = None,
        peers: Closing | None = None,
        path: str | None = None,
    ) -> None:
        """path: of the model's weights; None: they are nowhere."""
        self._scheduler, self._runner, self._grammar = scheduler, runner, grammar
        self._inbox, self._outbox, self._clock, self._profiler = inbox, outbox, clock, profiler
        self._peers, self._awaited_s = peers, 0.0
        self._loop = loop_of(scheduler, runner)
        self._vectors = vectors or Vectors()
        self._begun: list[TextRequest] = []
        self._live: dict[str, str | None] = {}  # rid -> its frontend
        self._flushes: list[tuple[float, FlushCacheReq]] = []  # (until when, question) that wait for idleness
        self._updates = WeightUpdates(scheduler, runner, path)
        self._memory = MemoryRelease(scheduler, runner, self._updates, clock, shared=peers is not None)
        self._precompiles = Precompiles(grammar)
        self._faults = 0
        self._working_since: float | None = None
        self.closed_because = "the engine was closed"
        self._lost: RuntimeFault | None = None

    def give_up(self, fault: RuntimeFault) -> None:
        """From any thread: nothing can be computed any more. `run` answers everybody with `fault`, and raises
        it, within LOST_S. Until then messages are still taken: whoever sends some gets the reason."""
        self._lost = fault

    @property
    def stalled_s(self) -> float:
        """Seconds since the current work began; 0 while waiting for messages."""
        since = self._working_since
        return 0.0 if since is None else max(0.0, self._clock() - since)

    def run(self) -> None:
        """Serve until the inbox is closed; then end what still runs, and release runner and grammars. Raises
        what it was given up for."""
        try:
            wait = 0.0
            while True:
                self._working_since = None
                mail = self._receive(wait)
                if self._lost is not None:
                    self._fail_all(self._lost)
                    raise self._lost
                self._working_since = self._clock()
                for item in mail:
                    self._take(item)
                wait = self._step()
        except MailboxClosed as closed:
            # Ours, or the detokeniser's, which takes no more: then posting fails once more, and says so.
            self._fail_all(EngineDead(str(closed) or self.closed_because))
        finally:
            self._working_since = None
            if self._grammar is not None:
                self._grammar.close()
            if self._profiler is not None:
                self._profiler.close()
            if self._peers is not None:
                self._peers.close()
            self._runner.close()

    def _receive(self, wait: float) -> list[Any]:
        """Mail; none when there is none for so long, or when it was given up."""
        until = self._clock() + wait
        while True:
            mail = self._inbox.receive(min(wait, LOST_S))
            wait = until - self._clock()
            if mail or wait <= 0 or self._lost is not None:
                return mail

    # -- mail ------------------------------------------------------------------------------------------------

    def _take(self, item: Any) -> None:
        match item:
            case TokenizedGenerateReqInput():
                self._add(item)
            case BatchTokenizedGenerateReqInput():
                for request in item.requests:
                    self._add(request)
            case TokenizedEmbeddingReqInput():
                self._embed(item)
            case AbortReq(frontend=str(gone)):
                for own in [rid for rid, frontend in self._live.items() if frontend == gone]:
                    self._scheduler.abort(own, message=item.message)
            case AbortReq():
                rid = None if item.abort_all else item.rid
                self._scheduler.abort(rid, prefix=item.prefix, message=item.message)
            case FlushCacheReq():
                self._flushes.append((self._clock() + max(0.0, item.timeout_s), item))
            case PauseReq():
                self._answer(item, lambda: self._pause(item))
            case ContinueReq():
                self._answer(item, self._resume)
            case OpenSessionReq():
                self._answer(item, lambda: self._open_session(item))
            case CloseSessionReq():
                self._answer(item, lambda: self._close_session(item))
            case GetStateReq():
                self._answer(item, lambda: (True, "", self._state()))
            case GetPrefixesReq():
                self._answer(item, lambda: (True, "", surveyed(self._scheduler, item)))
            case SetStateReq():
                self._answer(item, lambda: (True, "", self._scheduler.tune(item.values)))
            case PrecompileReq():
                self._begin(item, lambda: self._precompiles.add(item, self._clock()))
            case ProfileReq():
                self._answer(item, lambda: self._profile(item))
            case LoadLoRAAdapterReq():
                self._answer(item, lambda: self._load_adapter(item))
            case UnloadLoRAAdapterReq():
                self._answer(item, lambda: self._unload_adapter(item))
            case UpdateWeightsReq():
                self._begin(item, lambda: self._update(item))
            case ReleaseMemoryReq():
                self._begin(item, lambda: self._memory.add(item))
            case ResumeMemoryReq():
                self._answer(item, partial(self._memory.make, item))
            case HealthReq():
                paused, released = self._scheduler.paused, self._memory.released
                state = {"live": len(self._live), "paused": paused, "released": released}
                self._reply(item, (True, "", state))
            case SingleReq():
                fault = BadRequest(f"the scheduler does not know {type(item).__name__}", where="type")
                self._reply(item, (False, str(fault), fault.to_dict()))
            case _:
                # Dropped rather than fatal: whoever sent it is a defect, those who run are not.
                log.error("the scheduler got mail it does not know: %s", type(item).__name__)

    def _add(self, request: TokenizedGenerateReqInput) -> None:
        rid, frontend, params = request.rid, request.http_worker_ipc, request.sampling_params
        if rid in self._live:
            # The detokeniser could not distinguish the deltas of the two, so it only passes this answer on.
            taken = failed(
                rid, frontend, BadRequest(f"a request with the id {rid!r} is still running", where="rid")
            )
            self._outbox.send(BatchStrOutput(rids=[rid], outputs=[StrOutput(rid=rid, text="", delta=taken)]))
            return
        self._begun.append(
            TextRequest(
                rid=rid,
                stop=params.stop,
                stop_regex=params.stop_regex,
                skip_special_tokens=params.skip_special_tokens,
                no_stop_trim=params.no_stop_trim,
                at_start=request.at_start,
                stream=request.stream,
                http_worker_ipc=frontend,
            )
        )
        self._live[rid] = frontend
        try:
            self._memory.check_awake()
            self._scheduler.add(request)
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            self._scheduler.abort(rid)
            self._post([failed(rid, frontend, as_fault(error, "the request could not be taken in"))])

    def _embed(self, request: TokenizedEmbeddingReqInput) -> None:
        rid, frontend = request.rid, request.http_worker_ipc
        if rid in self._live:
            fault = BadRequest(f"a request with the id {rid!r} is still running", where="rid")
            self._post_vectors([failed_vector(request, failure(fault))])
            return
        self._live[rid] = frontend
        try:
            self._memory.check_awake()
            self._vectors.add(request, self._scheduler)
        except Exception as error:  # noqa: BLE001 - it is this request's answer
            self._scheduler.abort(rid)
            self._post([failed(rid, frontend, as_fault(error, "the request could not be taken in"))])

    # -- steps -----------------------------------------------------------------------------------------------

    def _step(self) -> float:
        """One step; how long to wait for mail before the next."""
        try:
            outputs = self._loop.step()
        except Exception as error:
            # A defect: the requests in hand are answered with it. If it comes again and again, nothing works.
            self._faults += 1
            log.exception("a step failed")
            self._fail_all(as_fault(error, "a step failed"))
            if self._faults >= MAX_FAULTS_IN_A_ROW:
                raise
            return 0.0
        if outputs:
            self._faults = 0
        self._post(outputs)
        if self._profiler is not None:
            self._profiler.stepped()
        self._answer_flushes()
        for update in self._updates.due(self._loop.in_flight):
            self._answer(update, partial(self._updates.make, update))
        if (release := self._memory.due(self._loop.in_flight)) is not None:
            self._answer(release, partial(self._memory.make, release))
        for asked, data in self._precompiles.due(self._clock()):
            self._reply(asked, (True, "", data))
        if self._loop.in_flight or outputs:
            self._awaited_s = 0.0
            return 0.0
        if not self._scheduler.busy:
            return LOOK_S if self._precompiles else IDLE_S
        if self._scheduler.paused is not None:
            return LOOK_S if self._precompiles else PAUSED_S
        if self._scheduler.running:
            self._awaited_s = 0.0
            return 0.0  # a step without deltas, such as a part of a prompt
        # All wait: for their grammars, or for other engines, and then longer and longer.
        if not self._scheduler.waits_elsewhere:
            return BLOCKED_S
        self._awaited_s = min(max(BLOCKED_S, 2 * self._awaited_s), AWAITED_S)
        return self._awaited_s

    def _fail_all(self, fault: RuntimeFault) -> None:
        """Answer every live request with `fault` and empty the scheduler."""
        try:
            outputs = self._loop.stop(fault)
        except Exception:
            log.exception("the scheduler cannot be emptied in order")
            outputs = []
        ended = {output.rid for output in outputs if output.finish is not None}
        left = [(rid, frontend) for rid, frontend in sorted(self._live.items()) if rid not in ended]
        self._post(outputs + [failed(rid, frontend, fault) for rid, frontend in left])

    def _post(self, outputs: Sequence[TokenOutput]) -> None:
        if not outputs and not self._begun:
            return
        begun, self._begun = self._begun, []
        for output in outputs:
            if output.finish is not None:
                self._live.pop(output.rid, None)
        outputs, vectors = self._vectors.split(outputs)
        self._post_vectors(vectors)
        if not outputs and not begun:
            return
        try:
            self._outbox.send(batch(outputs, begun))
        except WireError as error:
            # One by one; the delta that cannot travel becomes an error that can.
            log.error("outputs cannot travel: %s", error)
            self._outbox.send(batch([], begun))
            for output in outputs:
                self._post_alone(output)

    def _post_vectors(self, vectors: Sequence[EmbeddingOutput]) -> None:
        """Each alone where all together cannot travel."""
        if not vectors:
            return
        try:
            self._outbox.send(vector_batch(vectors))
        except WireError as error:
            if len(vectors) > 1:
                for vector in vectors:
                    self._post_vectors([vector])
                return
            alone = msgspec.structs.replace(vectors[0], embedding=[], meta={}, finish=failure(error))
            self._outbox.send(vector_batch([alone]))

    def _post_alone(self, output: TokenOutput) -> None:
        try:
            self._outbox.send(batch([output], []))
        except WireError as error:
            self._scheduler.abort(output.rid)
            self._live.pop(output.rid, None)
            self._outbox.send(batch([failed(output.rid, output.http_worker_ipc, error)], []))

    # -- questions -------------------------------------------------------------------------------------------

    def _answer(self, request: SingleReq, act: Callable[[], Answer]) -> None:
        try:
            answer = act()
        except RuntimeFault as fault:
            answer = (False, str(fault), fault.to_dict())
        except Exception as error:
            log.exception("%s failed", type(request).__name__)
            defect = as_fault(error, type(request).__name__)
            answer = (False, str(defect), defect.to_dict())
        self._reply(request, answer)

    def _reply(self, request: SingleReq, answer: Answer) -> None:
        ok, message, data = answer
        self._outbox.send(
            ControlOutput(
                rid=request.rid, http_worker_ipc=request.http_worker_ipc, ok=ok, message=message, data=data
            )
        )

    def _answer_flushes(self) -> None:
        """Flush for those who asked: once nothing runs, or when their time is up."""
        if not self._flushes:
            return
        now, busy = self._clock(), self._scheduler.busy
        waiting = self._flushes if busy else []
        due = [item for until, item in self._flushes if not busy or until <= now]
        self._flushes = [(until, item) for until, item in waiting if until > now]
        for item in due:
            self._answer(item, self._flush)

    def _flush(self) -> Answer:
        if self._scheduler.busy:
            count = len(self._live)
            left = f"{count} request{'s are' if count != 1 else ' is'} not finished"
            return False, f"the cache was not flushed: {left}", {"live": count}
        done = self._scheduler.flush_cache()
        if self._grammar is not None:
            self._grammar.flush()
        return done, "" if done else "some of the cache is still in use", {}

    def _begin(self, item: SingleReq, add: Callable[[], None]) -> None:
        try:
            add()
        except RuntimeFault as fault:
            self._reply(item, (False, str(fault), fault.to_dict()))

    def _update(self, item: UpdateWeightsReq) -> None:
        self._memory.check_weights()
        self._updates.add(item)

    def _pause(self, item: PauseReq) -> Answer:
        self._scheduler.pause(item.mode)
        return True, "", {"paused": item.mode}

    def _resume(self) -> Answer:
        self._scheduler.resume()
        return True, "", {"paused": None}

    def _open_session(self, item: OpenSessionReq) -> Answer:
        opened = self._scheduler.open_session(
            item.session_id, item.capacity, item.timeout_s, streaming=item.streaming, owner=item.owner
        )
        return True, "", {"session_id": opened}

    def _close_session(self, item: CloseSessionReq) -> Answer:
        self._scheduler.close_session(item.session_id, item.owner)
        return True, "", {"session_id": item.session_id}

    def _load_adapter(self, item: LoadLoRAAdapterReq) -> Answer:
        """No step is made meanwhile."""
        adapters = self._adapters()
        adapters.load(item.lora_name, item.lora_path, pinned=item.pinned)
        return True, "", {"loaded_adapters": adapters.loaded}

    def _unload_adapter(self, item: UnloadLoRAAdapterReq) -> Answer:
        adapters = self._adapters()
        adapters.unload(item.lora_name)
        return True, "", {"loaded_adapters": adapters.loaded}

    def _adapters(self) -> AdapterRegistry:
        match self._scheduler:
            case Scheduler(adapters=adapters):
                return adapters
            case EmbeddingScheduler():
                raise no_adapters("lora_name")

    def _profile(self, item: ProfileReq) -> Answer:
        if self._profiler is None:
            raise BadRequest("this engine has no profiler", where="profile")
        if item.action == "start":
            return True, "", self._profiler.start(item.folder, item.steps)
        return True, "", self._profiler.stop()

    def _state(self) -> dict[str, Any]:
        return {
            **self._scheduler.state(),
            **self._grammar_state(),
            "live": len(self._live),
            "faults_in_a_row": self._faults,
            "released": self._memory.released,
        }

    def _grammar_state(self) -> dict[str, Any]:
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
