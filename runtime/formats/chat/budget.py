"""What one rendering of a template may still spend: time, bytes made, values in one value.

It knows values, not Jinja's environment; the sandbox charges it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import jinja2

TIME_LIMIT_S = 0.8
"""Of the thread's own processor time."""
TIME_PER_INPUT_BYTE_S = 5e-7
WALL_S, WALL_FACTOR = 30.0, 10.0
"""What may pass on the clock, at least, and for each second of processor time: a busy machine, or one that
stands still, must not stop a harmless template."""
WORKED_CHECKS, WORKED_BYTES = 256, 1 << 20
"""Below both, little was done: time that passed was the machine's pause, and only the clock counts."""
MAX_MADE_BYTES = 48 << 20
"""All that one rendering may make, besides MADE_PER_INPUT_BYTE for each byte it was given."""
MADE_PER_INPUT_BYTE = 16
MAX_NUMBER = 1_000_000
"""Largest width, count or length that may be handed to a text's method or to a filter."""
MAX_RANGE = 100_000
MAX_NODES = 1_000_000
"""Values in one list or mapping, those in it counted as often as they would be printed."""
MAX_INT_BITS = 4096
HEAVY_INPUT = 100_000


class Limit(jinja2.TemplateError):
    """A limit of the sandbox was met."""


class Budget:
    """What one rendering may still spend. `given`: bytes of its input, roughly."""

    def __init__(self, given: int = 0, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._limit_s = time_limit_s = time_limit_s + TIME_PER_INPUT_BYTE_S * given
        now = time.monotonic()
        self._look_from, self._deadline = now + time_limit_s, now + max(WALL_S, time_limit_s * WALL_FACTOR)
        self._busy_until = time.thread_time() + time_limit_s
        self._checks = 0
        self._left = self._whole = MAX_MADE_BYTES + MADE_PER_INPUT_BYTE * given
        # id -> (the value, so that the id stays its own; bytes; nodes). Containers never change in here.
        self._known: dict[int, tuple[Any, int, int]] = {}

    def check(self) -> None:
        self._checks += 1
        now = time.monotonic()
        # The thread's own time is dearer to ask for, and never more than what passed.
        if now > self._look_from and (now > self._deadline or (self._worked() and self._busy())):
            raise Limit(f"the template does too much work: it took more than {self._limit_s:.2g} s")

    def _worked(self) -> bool:
        return self._checks > WORKED_CHECKS or self._whole - self._left > WORKED_BYTES

    def _busy(self) -> bool:
        return time.thread_time() > self._busy_until

    def charge(self, size: int) -> None:
        """Account for `size` bytes about to be made."""
        self._left -= size
        if self._left < 0:
            raise Limit(
                f"the template does too much work: it makes more than {self._whole >> 20} MiB of text"
            )

    def size(self, value: Any) -> int:
        """Bytes of `value` when printed, roughly and from above. Raises Limit for what is nested too much."""
        return self._measure(value, 0)[0]

    def _measure(self, value: Any, depth: int) -> tuple[int, int]:
        if isinstance(value, str):
            return bytes_of(value), 1
        if not isinstance(value, (list, tuple, dict, set, frozenset)):
            return 64, 1
        known = self._known.get(id(value))
        if known is not None:
            return known[1], known[2]
        if depth > 200:
            raise Limit("the template nests values more than 200 deep")
        size, count = 64, 1
        items = (part for pair in value.items() for part in pair) if isinstance(value, dict) else iter(value)
        for item in items:
            more, inner = self._measure(item, depth + 1)
            size, count = size + more + 8, count + inner
            if count > MAX_NODES:
                raise Limit(f"the template makes a value with more than {MAX_NODES} values in it")
        self.check()
        self._known[id(value)] = (value, size, count)
        return size, count

    def searched(self, value: Any) -> Any:
        """`value`, about to be compared or sorted in one go: not bigger than all that may be made."""
        self.check()
        if isinstance(value, (list, tuple, dict)) and self.size(value) > self._whole:
            raise Limit(
                f"the template does too much work: it compares more than {self._whole >> 20} MiB at once"
            )
        return value

    def made(self, value: Any) -> Any:
        """`value`, accounted for as new."""
        self.check()
        if isinstance(value, str):
            self.charge(bytes_of(value))
        elif isinstance(value, (list, tuple, dict, set, frozenset)):
            self.size(value)
            self.charge(64 + 16 * len(value))
        elif isinstance(value, bytes):
            self.charge(len(value))
        return value


BUDGET: ContextVar[Budget] = ContextVar("sglang_dsl_template_budget")
"""Of the rendering in progress."""


class Counted:
    """What a loop runs over; every round is checked and pays for the text of the loop's body."""

    def __init__(self, values: Iterable[Any], weight: int, budget: Budget) -> None:
        self._values, self._weight, self._budget = values, weight, budget

    def __len__(self) -> int:
        return len(self._values)  # type: ignore[arg-type] # a TypeError tells jinja2 that it must count

    def __iter__(self) -> Iterator[Any]:
        for value in self._values:
            self._budget.check()
            self._budget.charge(self._weight)
            yield value


def bytes_of(text: str) -> int:
    return sys.getsizeof(text) if len(text) > 64 else 128
