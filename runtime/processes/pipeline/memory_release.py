"""The model's memory given back for a while, and taken again: KV pool, weights, or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from runtime.plan import Runner, TextRunner
from runtime.processes.pipeline.weight_updates import WeightUpdates
from runtime.protocol.control import MemoryPart, ReleaseMemoryReq, ResumeMemoryReq
from runtime.protocol.errors import BadRequest, DeadlineExceeded, InternalFault, NotReady, NotSupported
from runtime.protocol.request_base import SingleReq
from runtime.scheduler.embedding_scheduler import EmbeddingScheduler
from runtime.scheduler.scheduler import Scheduler

Answer = tuple[bool, str, dict[str, list[MemoryPart]]]


class MemoryRelease:
    """What is released now, and the one order that waits for requests to end. Requests that come meanwhile
    are refused. shared: other engines read the KV pool."""

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

    @property
    def released(self) -> list[MemoryPart]:
        return sorted(self._released)

    def check_awake(self) -> None:
        """Raise NotReady where nothing can be computed, or soon cannot."""
        if self._released or self._waiting is not None:
            parts = " and ".join(self.released) or "memory"
            raise NotReady(f"the model is asleep: its {parts} was given back", hint="POST /wake_up")

    def check_weights(self) -> None:
        """Raise BadRequest where they are not there to be changed."""
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
        self._waiting = self._clock() + max(0.0, item.timeout_s), item
        if item.abort:
            scheduler.abort(None, message="the model goes to sleep")

    def due(self, in_flight: bool) -> ReleaseMemoryReq | None:
        """The order, to be made at once: nothing runs any more, or its time is up."""
        if self._waiting is None:
            return None
        until, item = self._waiting
        if self._scheduler.busy:
            return item if self._clock() >= until else None
        return None if in_flight else item

    def make(self, item: SingleReq) -> Answer:
        """Raises DeadlineExceeded, and what the runner raises."""
        match item:
            case ReleaseMemoryReq(parts=parts):
                self._waiting = None
                if self._scheduler.busy:
                    raise DeadlineExceeded("requests are not finished", hint="wait longer, or abort them")
                if not self._scheduler.flush_cache():
                    raise InternalFault("some of the KV cache is still in use", where="tags")
                self._decoder.release_memory(parts)
                self._released |= {*parts}
            case ResumeMemoryReq(parts=parts):
                if self._waiting is not None:  # no longer: it is told that its time is up
                    self._waiting = self._clock(), self._waiting[1]
                # The weights first: the pool then takes what is left.
                for part in sorted({*parts} & self._released, reverse=True):
                    self._decoder.restore_memory((part,), self._updates.path or "")
                    self._released.discard(part)
        return True, "", {"released": self.released}

    @property
    def _decoder(self) -> Runner:
        return cast(Runner, self._runner)
