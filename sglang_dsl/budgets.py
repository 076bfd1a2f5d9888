"""Budgets: how much a program, or a branch of one, may use. Knows no backends and no programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from sglang_dsl.errors import BadProgram

Price = Callable[[Mapping[str, Any]], float]


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits; None = none. A call reserves what it may use, its max_tokens included, and waits where that
    does not fit beside those under way. Alone, its max_tokens are clamped to what is left (the meta's
    clamped_max_tokens tells); when nothing is left it is refused with BudgetExceeded. A prompt's length is
    an estimate until its call is answered, and a choice cannot be clamped: the last call may go over these.

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
