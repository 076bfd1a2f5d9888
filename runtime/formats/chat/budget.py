"""The budget of one rendering of a template: work and memory as a single number of units, and CPU time.

It knows values, not Jinja's environment; the sandbox spends the budget.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jinja2

TIME_LIMIT_S = 0.8
"""CPU time of the thread."""
TIME_PER_INPUT_CHARACTER_S = 5e-7
UNITS = 24 << 20
"""For one rendering, in addition to UNITS_PER_INPUT_CHARACTER. A character of a new text is one unit (one to
four bytes)."""
UNITS_PER_INPUT_CHARACTER = 16
OBJECT = 32
"""Units of a new object, and of one iteration of a loop."""
ITEM = 8
FIRST_LOOK_S = 0.01
"""Elapsed time before the first check. Reading the CPU time is a system call, which most renderings avoid."""
LITTLE = 1 << 14
"""Units. If less was spent, the elapsed time was a pause of the machine and not the template's work."""
MAX_INT_BITS = 4096


class Limit(jinja2.TemplateError):
    """The template exceeded a limit of the sandbox."""


class Budget:
    """The budget of one rendering. values: its input, whose texts increase it.

    No value may grow beyond the whole budget. So a single operation of Python on it (printing, comparing,
    sorting) takes a fraction of a second, and the time is checked between operations.
    """

    def __init__(self, values: Any = None, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._values, self._limit_s = values, time_limit_s
        self._left = self._whole = UNITS
        self._look_at = time.monotonic() + FIRST_LOOK_S
        self._busy_until = 0.0
        # id -> (the container, kept alive so that its id is not reused; its size). Containers never change.
        self._sizes: dict[int, tuple[Any, int]] = {}

    def spend(self, units: int) -> None:
        """Called before an operation that needs `units`. Raises Limit."""
        self._left -= units
        if self._left < 0:
            self._add_input()
            if self._left < 0:
                raise self._exceeded()
        if time.monotonic() > self._look_at:
            self._look()

    def _look(self) -> None:
        """Check the time limit. CPU time never grows faster than elapsed time."""
        self._add_input()
        now = time.thread_time()
        if not self._busy_until:
            self._busy_until = now + self._limit_s
        if now > self._busy_until and self._whole - self._left > LITTLE:
            raise Limit(f"the template does too much work: it took more than {self._limit_s:.2g} s")
        self._look_at = time.monotonic() + max(self._busy_until - now, FIRST_LOOK_S)

    def _add_input(self) -> None:
        """Done once, and only for renderings that take longer: counting takes as long as a usual
        rendering."""
        if self._values is not None:
            characters, self._values = _characters(self._values), None
            self._limit_s += TIME_PER_INPUT_CHARACTER_S * characters
            self._whole += UNITS_PER_INPUT_CHARACTER * characters
            self._left += UNITS_PER_INPUT_CHARACTER * characters

    def _exceeded(self) -> Limit:
        return Limit(f"the template does too much work: it makes more than {self._whole >> 20} MiB of text")

    def size(self, value: Any) -> int:
        """Approximate units of `value` when printed. A value that it contains twice counts twice. Raises
        Limit if it exceeds the whole budget."""
        if isinstance(value, str):
            return OBJECT + len(value)
        if not isinstance(value, (list, tuple, dict, set, frozenset)):
            return OBJECT
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        size = OBJECT
        items = (part for pair in value.items() for part in pair) if isinstance(value, dict) else value
        for item in items:
            size += self.size(item) + ITEM
            if size > self._whole:
                self._add_input()
                if size > self._whole:
                    raise self._exceeded()
        self._sizes[id(value)] = (value, size)
        return size

    def new(self, value: Any) -> Any:
        """Account for `value`, the result of an operation. Raises Limit."""
        if isinstance(value, str):
            self.spend(OBJECT + len(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.size(value)
            self.spend(OBJECT + ITEM * len(value))
        elif isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
            raise Limit(f"the template makes a number of more than {MAX_INT_BITS} bits")
        else:
            self.spend(1)
        return value


BUDGET: ContextVar[Budget] = ContextVar("sglang_dsl_template_budget")
"""The budget of the current rendering."""


class Rounds:
    """An iterable for loops. Each iteration spends `units`."""

    def __init__(self, values: Iterable[Any], units: int, budget: Budget) -> None:
        self._values, self._units, self._budget = values, units, budget

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type] # jinja2 handles a TypeError

    def __iter__(self) -> Iterator[Any]:
        spend, units = self._budget.spend, self._units
        for value in self._values:
            spend(units)
            yield value


def _characters(value: Any) -> int:
    """Approximate number of characters in a request's values."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 8
    return sum(map(_characters, value))
