"""process/runtime/api/test_sampling.py, at length."""

from __future__ import annotations

from typing import Any

import pytest

from tests.process.runtime.api.test_sampling import test_same_seed_same_output_in_random_company as check


@pytest.mark.parametrize(
    ("seed", "options"),
    [
        pytest.param(1, {"chunked_prefill_size": 7}, id="chunks"),
        pytest.param(2, {"pack_weights": "never"}, id="unpacked"),
    ],
)
def test_same_seed_same_output_in_random_company(seed: int, options: dict[str, Any]) -> None:
    check(seed, options)
