"""Budgets: how much a program, or a branch of one, may use. Knows no backends and no programs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sglang_dsl.errors import BadProgram, BudgetExceeded

Price = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits; None = none. A call is refused with BudgetExceeded when one of them is reached before it; the
    call that goes over a limit is still told.

    tokens   prompt tokens that were not cached, and completion tokens
    calls    generations and choices
    seconds  since the program (or branch) began; calls under way are cut short at its end
    cost     in the unit of `price`, which says what a call cost from its meta (prompt_tokens, cached_tokens,
             completion_tokens, ...)
    """

    tokens: int | None = None
    calls: int | None = None
    seconds: float | None = None
    cost: float | None = None
    price: Price | None = None

    def __repr__(self) -> str:
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        return f"Budget({', '.join(f'{name}={one!r}' for name, one in said.items() if one is not None)})"

    def __post_init__(self) -> None:
        for name in ("tokens", "calls", "seconds", "cost"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise BadProgram(f"a budget's {name} is a number of at least 0, got {value!r}")
        if self.cost is not None and self.price is None:
            raise BadProgram("a budget's cost needs price, a function from a call's meta to what it cost")


def price_per_million(prompt: float, completion: float, cached: float | None = None) -> Price:
    """A price list: what a million tokens of each kind cost. `cached` None: as much as `prompt`."""

    def price(meta: Mapping[str, Any]) -> float:
        said, found, made = (
            int(meta.get(key) or 0) for key in ("prompt_tokens", "cached_tokens", "completion_tokens")
        )
        cost = (said - found) * prompt + found * (prompt if cached is None else cached) + made * completion
        return cost / 1e6

    return price


class Meter:
    """What was used of a budget, counted from now on; safe from any thread."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget, self._clock = budget, clock
        self._began = clock()
        self._lock = threading.Lock()
        self.tokens = self.calls = 0
        self.cost = 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds left; None without such a limit."""
        limit = self.budget.seconds
        return None if limit is None else limit - (self._clock() - self._began)

    def check(self) -> None:
        """Raises BudgetExceeded where a limit is reached."""
        with self._lock:
            used = {"tokens": self.tokens, "calls": self.calls, "cost": self.cost}
            for name, value in used.items():
                limit = getattr(self.budget, name)
                if limit is not None and value >= limit:
                    raise self._exceeded(f"{value:g} {name} of {limit:g}")
            left = self.left_s
            if left is not None and left <= 0:
                raise self._exceeded(f"all of its {self.budget.seconds:g} seconds")

    def count(self) -> None:
        """A call is made."""
        with self._lock:
            self.calls += 1

    def charge(self, meta: Mapping[str, Any]) -> None:
        """Count what a call used."""
        fresh = int(meta.get("prompt_tokens") or 0) - int(meta.get("cached_tokens") or 0)
        cost = 0.0 if self.budget.price is None else float(self.budget.price(meta))
        with self._lock:
            self.tokens += max(0, fresh) + int(meta.get("completion_tokens") or 0)
            self.cost += cost

    def late(self) -> BudgetExceeded:
        """The error of a call that the budget's time has cut short."""
        return self._exceeded(f"all of its {self.budget.seconds:g} seconds")

    @staticmethod
    def _exceeded(used: str) -> BudgetExceeded:
        return BudgetExceeded(f"the budget is spent: {used} used", hint="give a larger Budget(...)")
