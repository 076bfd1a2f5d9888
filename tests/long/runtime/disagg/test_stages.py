"""unit/runtime/disagg/test_stages.py, at length."""

from __future__ import annotations

import pytest

from tests.unit.runtime.disagg.test_stages import test_faults_at_random as check


@pytest.mark.parametrize("seed", range(2, 60))
def test_faults_at_random(seed: int) -> None:
    check(seed)
