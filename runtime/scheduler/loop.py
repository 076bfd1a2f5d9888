"""The loop: joins scheduler and runner, and keeps the errors of each from the other.

Plain: plan, launch, masks, finish, commit, and its outputs. Overlapped, a tick first ends the step under way,
then plans and launches the next, and only then returns the outputs of the one that ended: the CPU builds
outputs, accepts and admits requests and fills masks while the model computes. Outputs are the same.
"""

from __future__ import annotations

import logging

from runtime.plan import Runner
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import TokenOutput
from runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


def step(scheduler: Scheduler, runner: Runner) -> list[TokenOutput]:
    """Plan, run, commit; returns the outputs. If nothing can run: only drain(). An exception of the runner is
    the answer to the requests of this plan; the next step is not affected."""
    plan = scheduler.plan()
    if plan is None:
        return scheduler.drain()
    try:
        runner.launch(plan)
        result = runner.finish(scheduler.masks())
    except Exception as error:  # noqa: BLE001 - every request of the plan is answered with it
        return scheduler.fail(error)
    return scheduler.commit(result)


class Loop:
    """Steps, plain or overlapped. One thread calls it; between two step()s it may call any method of the
    scheduler except those of the step. in_flight: a pass runs now, so step() should be called again soon."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, overlap: bool) -> None:
        self._scheduler, self._runner, self._overlap = scheduler, runner, overlap
        self.in_flight = False
        scheduler.guided.overlapped = overlap

    def step(self) -> list[TokenOutput]:
        """One tick; returns its outputs. Overlapped, a pass may be running when it returns."""
        if not self._overlap:
            return step(self._scheduler, self._runner)
        if self.in_flight:
            self._land()
        self._launch()
        if self._scheduler.guided.has_deferred:
            self._scheduler.run_deferred(self._runner.done if self.in_flight else None)
            if not self.in_flight:
                self._launch()  # requests that waited for it can run
        return self._scheduler.drain()

    def stop(self, fault: RuntimeFault) -> list[TokenOutput]:
        """End: wait for the pass under way, drop its result, and fail every request with `fault`."""
        if self.in_flight:
            self.in_flight = False
            try:
                self._runner.finish({})
            except Exception as error:  # noqa: BLE001 - its requests are answered below, as all others
                log.warning("the last pass failed too: %s", error)
        return self._scheduler.give_up(fault)

    def _launch(self) -> None:
        plan = self._scheduler.plan()
        if plan is None:
            return
        try:
            self._runner.launch(plan)
        except Exception as error:  # noqa: BLE001 - every request of the plan is answered with it
            self._scheduler.fail_step(error)
        else:
            self.in_flight = True

    def _land(self) -> None:
        masks = self._scheduler.masks(self._runner.done)
        self._scheduler.prepare()
        self.in_flight = False
        try:
            result = self._runner.finish(masks)
        except Exception as error:  # noqa: BLE001 - every request of the plan is answered with it
            self._scheduler.fail_step(error)
        else:
            self._scheduler.settle(result)
