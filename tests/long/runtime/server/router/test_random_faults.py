"""process/runtime/server/router/test_random_faults.py, at length."""

from __future__ import annotations

import pytest

from tests.process.runtime.server.router.test_random_faults import test_faults_at_random as check


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("prefill", [0, 2], ids=["replicas", "pairs"])
def test_faults_at_random(prefill: int) -> None:
    check(prefill, 2000)
