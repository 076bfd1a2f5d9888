"""What tests around a running engine share: a model that is as slow as a test needs it.

Threads stand still whenever a machine likes. What a test does while a generation runs must not depend on the
generation being longer than that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from runtime.plan import StepPlan

REST_S = 0.03
"""How long a slow step takes: 1,500 tokens last for 45 s, and orders are still answered soon."""
ENDLESS = 1500
"""Who may generate so many tokens is not meant to reach the end."""


class Pace:
    """How fast models in this process go. A step rests while `hold()` is in force, and while somebody in it
    may generate ENDLESS tokens; all others go as fast as they can."""

    def __init__(self) -> None:
        self._free = threading.Event()
        self._free.set()
        self._over = threading.Event()
        self._rest_s, self._quick = REST_S, 0

    def hold(self, rest_s: float = 0.05, after: int = 0) -> None:
        """Rest so long in each step, until `free()` is called; but not in the next `after` steps."""
        self._rest_s, self._quick = rest_s, after
        self._free.clear()

    def free(self) -> None:
        self._free.set()

    def end(self) -> None:
        """Nobody rests any more."""
        self._free.set()
        self._over.set()

    def rest(self, plan: StepPlan) -> None:
        if any(row.sampling.max_new_tokens >= ENDLESS for row in plan.rows):
            self._over.wait(REST_S)
        elif self._quick:
            self._quick -= 1
        else:
            self._free.wait(self._rest_s)


@pytest.fixture
def pace(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pace]:
    """Of every decoder that computes in this process, also of engines that were there before."""
    from runtime.engine.runner import TorchRunner

    made, launch = Pace(), TorchRunner.launch

    def slowly(self: Any, plan: StepPlan) -> None:
        made.rest(plan)
        launch(self, plan)

    monkeypatch.setattr(TorchRunner, "launch", slowly)
    yield made
    made.end()
