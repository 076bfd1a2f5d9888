"""unit/runtime/scheduler/requests/test_speculation.py, at length."""

from __future__ import annotations

import os
from typing import Any

import pytest

from runtime.scheduler.speculation import Speculation
from tests.unit.runtime.scheduler.requests.test_speculation import MODEL, NGRAM, check, knowing

TRACES = int(os.environ.get("SLOW_EXAMPLES", "100"))


@pytest.mark.parametrize("share", [0.95, 0.8, 0.4])
def test_answers_are_the_same_in_many_traces(
    make_bench: Any, toy_grammars: Any, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 requests each: SLOW_EXAMPLES=300 makes 6,000."""
    with monkeypatch.context() as patch:
        patch.setattr(Speculation, "guesses", knowing(share))
        for seed in range(1000, 1000 + TRACES // 3):
            check(make_bench, toy_grammars, seed, speculation=NGRAM)
    for seed in range(2000, 2000 + TRACES // 10):
        check(make_bench, toy_grammars, seed, speculation=NGRAM)
        check(make_bench, toy_grammars, seed, speculation=MODEL)
