"""One tick: scheduler and runner joined, with the errors of the one kept from the other. Knows neither's
inside."""

from __future__ import annotations

from runtime.plan import Runner
from runtime.protocol.io_struct import TokenOutput
from runtime.scheduler.scheduler import Scheduler


def step(scheduler: Scheduler, runner: Runner) -> list[TokenOutput]:
    """Plan, run, commit; the news. Without anything to run: only what drain() gives, at once.

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
