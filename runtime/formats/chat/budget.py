"""What one rendering of a template may spend: work and memory, as one number of units, and processor time.

It knows values, not Jinja's environment; the sandbox spends.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jinja2

TIME_LIMIT_S = 0.8
"""Of the thread's own processor time."""
TIME_PER_INPUT_CHARACTER_S = 5e-7
UNITS = 24 << 20
"""For one rendering, besides UNITS_PER_INPUT_CHARACTER. A character of a new text is one unit (of one to four
bytes)."""
UNITS_PER_INPUT_CHARACTER = 16
OBJECT = 32
"""Units of a new object, and of a round of a loop."""
ITEM = 8
FIRST_LOOK_S = 0.01
"""By the clock. Asking for processor time is a system call, which most renderings do without."""
LITTLE = 1 << 14
"""Units. If less was spent, time that passed was a pause of the machine and not the template's."""
MAX_INT_BITS = 4096


class Limit(jinja2.TemplateError):
    """The template met a limit of the sandbox."""


class Budget:
    """For one rendering. values: its input, whose texts add to it.

    No value may grow beyond the whole budget, so a single operation of Python on it (printing, comparing,
    sorting) takes a fraction of a second, and time is looked at between operations.
    """

    def __init__(self, values: Any = None, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._values, self._limit_s = values, time_limit_s
        self._left = self._whole = UNITS
        self._look_at = time.monotonic() + FIRST_LOOK_S
        self._busy_until = 0.0
        # id -> (the container, kept so that its id is not used again; its size). No container ever changes.
        self._sizes: dict[int, tuple[Any, int]] = {}

    def spend(self, units: int) -> None:
        """Before an operation that needs so much. Raises Limit."""
        self._left -= units
        if self._left < 0:
            self._add_input()
            if self._left < 0:
                raise self._exceeded()
        if time.monotonic() > self._look_at:
            self._look()

    def _look(self) -> None:
        """Whether the time is up. Processor time never grows faster than the clock."""
        self._add_input()
        now = time.thread_time()
        if not self._busy_until:
            self._busy_until = now + self._limit_s
        if now > self._busy_until and self._whole - self._left > LITTLE:
            raise Limit(f"the template does too much work: it took more than {self._limit_s:.2g} s")
        self._look_at = time.monotonic() + max(self._busy_until - now, FIRST_LOOK_S)

    def _add_input(self) -> None:
        """Once, and only for what is not rendered at once: counting takes as long as a usual rendering."""
        if self._values is not None:
            characters, self._values = _characters(self._values), None
            self._limit_s += TIME_PER_INPUT_CHARACTER_S * characters
            self._whole += UNITS_PER_INPUT_CHARACTER * characters
            self._left += UNITS_PER_INPUT_CHARACTER * characters

    def _exceeded(self) -> Limit:
        return Limit(f"the template does too much work: it makes more than {self._whole >> 20} MiB of text")

    def size(self, value: Any) -> int:
        """Units of `value` when printed, roughly. A value that is in it twice counts twice. Raises Limit if
        it exceeds the whole budget."""
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
        """Accounts for `value`, which an operation returned. Raises Limit."""
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
"""Of the rendering in progress."""


class Rounds:
    """What a loop runs over. Each round spends `units`."""

    def __init__(self, values: Iterable[Any], units: int, budget: Budget) -> None:
        self._values, self._units, self._budget = values, units, budget

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type] # on a TypeError jinja2 counts

    def __iter__(self) -> Iterator[Any]:
        spend, units = self._budget.spend, self._units
        for value in self._values:
            spend(units)
            yield value


def _characters(value: Any) -> int:
    """Of the texts in a request's values, roughly."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return 8
    return sum(map(_characters, value))
