"""Accounts of budgets while programs run: each call reserves what it may use. Knows no backends and no
programs."""

from __future__ import annotations

import asyncio
import bisect
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from sglang_dsl.budgets import Budget
from sglang_dsl.errors import BudgetExceeded


class Ask(msgspec.Struct, frozen=True, gc=False):
    """What a call may use: about `fresh` prompt tokens that are not cached, and `most` tokens for each of its
    `n` texts. `fixed`: these cannot be made fewer."""

    fresh: int
    most: int
    n: int = 1
    fixed: bool = False


class Hold(msgspec.Struct, frozen=True, gc=False):
    """What a meter has reserved for a call, which may have `most` tokens for each text."""

    meter: Meter
    most: int
    tokens: int = 0
    cost: float = 0.0


class Meter:
    """What was used of a budget from now on, and what running calls may still use. Calls reserve and release
    on one event loop; all else is safe from any thread."""

    def __init__(self, budget: Budget, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget, self._clock = budget, clock
        self._began = clock()
        self._lock = threading.Lock()
        self.tokens = self.calls = 0
        self.cost = 0.0
        # Of running calls. Calls that wait for a reservation do so in order.
        self._held: list[Hold] = []
        self._turn, self._freed = asyncio.Lock(), asyncio.Event()

    @property
    def left_s(self) -> float | None:
        """Seconds left; None without such a limit."""
        limit = self.budget.seconds
        return None if limit is None else limit - (self._clock() - self._began)

    def check(self) -> None:
        """Raises BudgetExceeded if a limit is reached."""
        with self._lock:
            used = {"tokens": self.tokens, "calls": self.calls, "cost": self.cost}
            for name, value in used.items():
                limit = getattr(self.budget, name)
                if limit is not None and value >= limit:
                    raise self._exceeded(f"{value:g} of {limit:g} {name}")
            left = self.left_s
            if left is not None and left <= 0:
                raise self._exceeded(f"all of its {self.budget.seconds:g} seconds")

    async def reserve(self, ask: Ask) -> Hold:
        """Count a call and reserve what it may use; waits until that fits. Raises BudgetExceeded."""
        if self.budget.tokens is None and self.budget.cost is None:
            self.check()
            self.calls += 1
            return Hold(self, ask.most)
        async with self._turn:
            while (hold := self.reserve_now(ask)) is None:
                self._freed.clear()
                await self._freed.wait()
            return hold

    def reserve_now(self, ask: Ask) -> Hold | None:
        """The same without waiting: None if it does not fit yet. Raises BudgetExceeded."""
        self.check()
        most = ask.most
        if not self._fits(ask, most):
            if self._held:
                return None
            most = most if ask.fixed else self._clamped(ask)
        self.calls += 1
        hold = Hold(self, most, ask.fresh + most * ask.n, self._price(ask, most))
        self._held.append(hold)
        return hold

    def release(self, hold: Hold, *, counts: bool = True) -> None:
        """The call is over; `counts`: whether it was made."""
        if not counts:
            self.calls -= 1
        self._held = [one for one in self._held if one is not hold]
        self._freed.set()

    def _fits(self, ask: Ask, most: int) -> bool:
        tokens, cost = self._left()
        return (tokens is None or ask.fresh + most * ask.n <= tokens) and (
            cost is None or self._price(ask, most) <= cost
        )

    def _left(self) -> tuple[int | None, float | None]:
        """Tokens and cost that are neither used nor reserved; None without such a limit."""
        tokens, cost = self.budget.tokens, self.budget.cost
        if tokens is not None:
            tokens -= self.tokens + sum(hold.tokens for hold in self._held)
        if cost is not None:
            cost -= self.cost + sum(hold.cost for hold in self._held)
        return tokens, cost

    def _clamped(self, ask: Ask) -> int:
        """The tokens per text for a call that runs alone. Raises BudgetExceeded if there is not one for
        each."""
        most = ask.most
        tokens, cost = self._left()
        if tokens is not None:
            if most and tokens < ask.n:
                raise self._exceeded(f"{self.tokens} of {self.budget.tokens:g} tokens")
            most = min(most, max(1, (tokens - ask.fresh) // ask.n))
        if cost is not None and most > 1:
            least = self._price(ask, 1)  # one token may cost more than is left
            counts = range(1, most + 1)
            most = bisect.bisect_right(counts, max(cost, least), key=lambda count: self._price(ask, count))
        return most

    def _price(self, ask: Ask, most: int) -> float:
        if self.budget.price is None or self.budget.cost is None:
            return 0.0
        used = {"prompt_tokens": ask.fresh, "cached_tokens": 0, "completion_tokens": most * ask.n}
        return float(self.budget.price(used))

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
        return BudgetExceeded(f"the budget is used up: {used}", hint="pass a larger Budget(...)")
