"""process/programs/test_differential.py, at length."""

from __future__ import annotations

import pytest

from runtime.api import Engine
from tests.exploring import EXPLORE
from tests.process.programs.test_differential import ALL, alone, compare, requests, url


@pytest.mark.timeout(1800)
def test_every_way_gives_the_same_tokens_at_length(alone: Engine, url: str) -> None:
    compare(alone, url, requests(ALL, seed=EXPLORE + 2))
