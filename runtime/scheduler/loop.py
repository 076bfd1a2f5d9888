"""The loop's one tick: scheduler and runner joined, with the errors of the one kept from the other. Knows
neither's inside.

Plain:       plan, launch, masks, finish, commit, and its outputs.
Overlapped:  the same steps, cut elsewhere. A tick first ends the step that is under way, then plans and
             launches the next, and only then gives the outputs of the one that ended.

So these run on the CPU while the model computes: making and posting outputs, taking requests in (checks,
sessions, prompts), deadlines, grammars that got ready, letting in those for whom there is room, filling
masks. What stays between two passes is what the next plan needs: the sampled tokens, stop conditions,
grammars' and jump-forward's moves, prefixes going to the cache, slots, and the plan itself (with those let in
whose room came free only now). Each request gets exactly what the plain loop gives it.
"""

from __future__ import annotations

import logging

from runtime.plan import Runner
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import TokenOutput
from runtime.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


def step(scheduler: Scheduler, runner: Runner) -> list[TokenOutput]:
    """Plan, run, commit; the outputs. Without anything to run: only what drain() gives, at once.

    Whatever the runner raises becomes an error answer for the requests of this plan; the next step is
    unaffected.
    """
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
    """Steps, plain or overlapped. One thread calls it; between two step()s it may call any verb of the
    scheduler but those of the step."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, overlap: bool) -> None:
        self._scheduler, self._runner, self._overlap = scheduler, runner, overlap
        self._in_flight = False
        scheduler.guided.overlapped = overlap

    @property
    def in_flight(self) -> bool:
        """Whether a pass runs now: step() again soon, and do not wait long for anything before."""
        return self._in_flight

    def step(self) -> list[TokenOutput]:
        """One tick; its outputs. Overlapped, a pass may be running when it returns, and the first tick of a
        burst has no outputs yet."""
        if not self._overlap:
            return step(self._scheduler, self._runner)
        if self._in_flight:
            self._land()
        self._launch()
        if self._scheduler.guided.has_deferred:
            self._scheduler.run_deferred(self._runner.done if self._in_flight else None)
            if not self._in_flight:
                self._launch()  # those who waited for it can go on
        return self._scheduler.drain()

    def stop(self, fault: RuntimeFault) -> list[TokenOutput]:
        """End: the pass under way is awaited, its result dropped, and every request fails with `fault`."""
        if self._in_flight:
            self._in_flight = False
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
            self._in_flight = True

    def _land(self) -> None:
        masks = self._scheduler.masks(self._runner.done)
        self._scheduler.prepare()
        self._in_flight = False
        try:
            result = self._runner.finish(masks)
        except Exception as error:  # noqa: BLE001 - every request of the plan is answered with it
            self._scheduler.fail_step(error)
        else:
            self._scheduler.settle(result)
