"""unit/runtime/grammar/test_properties_steps.py, at length."""

from __future__ import annotations

import pytest

from tests.exploring import SLOW_EXAMPLES
from tests.unit.runtime.grammar.test_properties_steps import STARTS, explore

pytestmark = pytest.mark.drawn


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", STARTS)
def test_many_steps_and_copies_are_exact(name):
    explore(name, SLOW_EXAMPLES)
