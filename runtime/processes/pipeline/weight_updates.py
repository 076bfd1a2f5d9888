"""New weights for a model that runs: no step is begun until they are there, and no KV is kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from runtime.plan import Runner, TextRunner
from runtime.protocol.control import PauseMode, UpdateWeightsReq
from runtime.protocol.errors import InternalFault, NotSupported
from runtime.scheduler.embedding_scheduler import EmbeddingScheduler
from runtime.scheduler.scheduler import Scheduler


class WeightUpdates:
    """Those that were asked for. Requests in hand go back to the queue and are computed again, with what they
    have said by now, under the new weights."""

    def __init__(
        self,
        scheduler: Scheduler | EmbeddingScheduler,
        runner: Runner | TextRunner,
        path: str | None = None,
    ) -> None:
        """path: where the weights are that are used now; None: nowhere."""
        self._scheduler, self._runner, self.path = scheduler, runner, path
        self._asked: list[UpdateWeightsReq] = []
        self._before: PauseMode | None = None  # how the scheduler was paused before the first of them

    def add(self, item: UpdateWeightsReq) -> None:
        """Raises NotSupported: the model is an encoder."""
        scheduler = self._scheduler
        if isinstance(scheduler, EmbeddingScheduler):
            raise NotSupported("an encoder's weights cannot be changed", where="model_path")
        if not self._asked:
            self._before = scheduler.paused
        self._asked.append(item)
        scheduler.pause("abort" if item.abort_all else "retract")

    def due(self, in_flight: bool) -> Iterator[UpdateWeightsReq]:
        """Each of them, to be made at once, where nothing runs any more; then the scheduler goes on as it did
        before."""
        if not self._asked or in_flight or self._scheduler.running:
            return
        asked, self._asked = self._asked, []
        yield from asked
        if self._before is None:
            self._scheduler.resume()
        else:
            self._scheduler.pause(self._before)

    def make(self, item: UpdateWeightsReq) -> tuple[bool, str, dict[str, Any]]:
        """Raises what the runner raises."""
        if not self._scheduler.flush_cache():
            raise InternalFault("some of the KV cache is still in use", where="model_path")
        cast(Runner, self._runner).update_weights(item.model_path)
        self.path = item.model_path
        return True, f"the weights are those of {item.model_path}", {}
