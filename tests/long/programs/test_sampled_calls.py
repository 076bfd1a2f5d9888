"""process/programs/test_sampled_calls.py, at length."""

from __future__ import annotations

import pytest

from runtime.api import Engine
from tests.process.programs.test_sampled_calls import test_they_are_calls_of_allowed_tools as check


@pytest.mark.timeout(3600)
def test_they_are_calls_of_allowed_tools(engine: Engine) -> None:
    check(engine, 1000)
