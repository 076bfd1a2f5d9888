"""process/runtime/disagg/test_engine_pair_faults.py, at length."""

from __future__ import annotations

import pytest

from tests.process.runtime.disagg.test_engine_pair_faults import test_a_link_that_fails_all_the_time as check


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("backend", "count"), [("tcp", 2000), ("local", 2000), ("nixl", 500)])
def test_a_link_that_fails_all_the_time(monkeypatch: pytest.MonkeyPatch, backend: str, count: int) -> None:
    check(monkeypatch, backend, count)
