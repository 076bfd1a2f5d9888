"""Budgets: how much a program, or one of its branches, may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sglang_dsl.errors import BadProgram

Price = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits for a run, or for one branch. None means no limit.

    tokens   prompt tokens that were not cached, and completion tokens
    calls    generations and choices
    seconds  since the program (or branch) began; calls that are running at the end are aborted
    cost     in the unit of `price`
    price    a function that computes what a call cost from its metadata (prompt_tokens, cached_tokens,
             completion_tokens, ...)

    A call reserves what it may use, including its max_tokens. If that does not fit next to the running calls,
    it waits. If no other call is running, its max_tokens are reduced to what is left (reported as
    `clamped_max_tokens` in the metadata). If nothing is left, it raises BudgetExceeded.

    The length of a prompt is an estimate until the call is answered, and a choice cannot be reduced. The last
    call may therefore exceed the limits.
    """

    tokens: int | None = None
    calls: int | None = None
    seconds: float | None = None
    cost: float | None = None
    price: Price | None = None

    def __repr__(self) -> str:
        limits = {f.name: getattr(self, f.name) for f in fields(self)}
        return f"Budget({', '.join(f'{name}={one!r}' for name, one in limits.items() if one is not None)})"

    def __post_init__(self) -> None:
        for name in ("tokens", "calls", "seconds", "cost"):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise BadProgram(f"a budget's {name} must be at least 0, got {value!r}")
        if self.cost is not None and self.price is None:
            raise BadProgram("a budget's cost needs price, a function from a call's metadata to its cost")


def price_per_million(prompt: float, completion: float, cached: float | None = None) -> Price:
    """A price list for Budget and plan: the cost of a million tokens. cached None: as `prompt`."""

    def price(meta: Mapping[str, Any]) -> float:
        names = ("prompt_tokens", "cached_tokens", "completion_tokens")
        read, reused, generated = (int(meta.get(name) or 0) for name in names)
        cached_price = prompt if cached is None else cached
        return ((read - reused) * prompt + reused * cached_price + generated * completion) / 1e6

    return price
