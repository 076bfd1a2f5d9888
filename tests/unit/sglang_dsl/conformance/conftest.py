"""The backends on which the language is tested here: the mock, and the bundled checkpoint in this process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sglang_dsl import EngineBackend, MockBackend
from sglang_dsl.backends.base import Backend
from tests.unit.sglang_dsl.conformance.parts import Api, serving


@pytest.fixture(scope="session")
def pocket() -> Iterator[Any]:
    from runtime.api import Engine

    with Engine("pocket", max_total_tokens=8192, threads=1, dtype="float32") as engine:
        yield engine


@pytest.fixture(params=["mock", "pocket"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "mock":
        return MockBackend()
    return EngineBackend(request.getfixturevalue("pocket"))


@pytest.fixture(scope="session")
def _server() -> Iterator[Api]:
    with serving() as api:
        yield api


@pytest.fixture
def api(_server: Api) -> Api:
    _server.sent.clear()
    return _server
