"""unit/runtime/scheduler/guided/test_jump_equality.py, at length."""

from __future__ import annotations

import pytest

from runtime.grammar.backends.outlines_backend import OutlinesGrammarBackend
from tests.exploring import EXPLORE, SLOW_EXAMPLES
from tests.unit.runtime.grammar.conftest import MAKERS
from tests.unit.runtime.scheduler.guided.test_jump_equality import check_canonical, check_equal


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(MAKERS))
def test_thousands_of_times(name: str) -> None:
    trained = MAKERS[name]()
    backend = OutlinesGrammarBackend(trained.vocabulary)
    for seed in range(EXPLORE, EXPLORE + max(1, SLOW_EXAMPLES * 2 // 5)):
        check_equal(trained, backend, seed, 25)
        check_canonical(trained, backend, seed, 25)
