"""One engine on the bundled checkpoint for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from runtime.api import Engine

if TYPE_CHECKING:
    from sglang_dsl.backends.engine import EngineBackend


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with Engine("pocket", max_total_tokens=8192) as running:
        yield running


@pytest.fixture(scope="session")
def plain_engine() -> Iterator[Engine]:
    """The same without jump-forward and without the radix cache."""
    with Engine("pocket", max_total_tokens=8192, jump_forward=False, radix_cache=False) as running:
        yield running


@pytest.fixture
def backend(engine: Engine) -> EngineBackend:
    from sglang_dsl.backends.engine import EngineBackend

    return EngineBackend(engine)
