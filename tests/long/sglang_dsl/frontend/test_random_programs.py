"""unit/sglang_dsl/frontend/test_random_programs.py, at length."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tests.unit.sglang_dsl.frontend.faulty import FAULTS
from tests.unit.sglang_dsl.frontend.test_random_programs import BEGIN, run_trials

pytestmark = pytest.mark.drawn


@pytest.mark.timeout(3600)
def test_nothing_hangs_in_10_000_programs(tmp_path: Path) -> None:
    before = threading.active_count()
    count = int(os.environ.get("PROGRAMS", "10000"))
    began = time.monotonic()
    outcomes, met = run_trials(BEGIN + 1_000_000, count, tmp_path)
    took = time.monotonic() - began
    print(f"\n{count} programs in {took:.0f} s; {sum(met.values())} faults met: {dict(met)}")
    print(f"outcomes: {dict(outcomes)}; threads {before} -> {threading.active_count()}")
    assert set(met) == set(FAULTS)
