"""The fixtures of tests/unit/runtime/scheduler."""

from tests.unit.runtime.scheduler.conftest import (
    _nothing_is_given_up_for_its_time,
    bench,
    make_bench,
    toy_grammars,
    vocabulary,
)

__all__ = ["_nothing_is_given_up_for_its_time", "bench", "make_bench", "toy_grammars", "vocabulary"]
