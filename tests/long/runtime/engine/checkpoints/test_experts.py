"""unit/runtime/engine/checkpoints/test_experts.py, at length."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.runtime.engine.checkpoints.expert_families import EXPERTS
from tests.unit.runtime.engine.checkpoints.test_experts import (
    test_greedy_text_of_ranks_is_the_models as check,
)


@pytest.mark.parametrize("name", EXPERTS)
def test_greedy_text_of_four_ranks_is_the_models(name: str, tiny: Any, drive: Any, prompt: Any) -> None:
    check(name, 4, tiny, drive, prompt)
