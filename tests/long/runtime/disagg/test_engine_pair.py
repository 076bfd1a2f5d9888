"""process/runtime/disagg/test_engine_pair.py, at length."""

from __future__ import annotations

from runtime.api import Engine
from tests.process.runtime.disagg.test_engine_pair import alone
from tests.process.runtime.disagg.test_engine_pair import test_the_same_answers_as_of_one_engine as check


def test_the_same_answers_as_of_one_engine(alone: Engine) -> None:
    check(alone, 1)
