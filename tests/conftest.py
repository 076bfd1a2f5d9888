"""Settings for the whole suite: property tests are about truth, not about speed on a busy machine. They
try the same examples each time; EXPLORE=1 in the environment draws new ones."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=not os.environ.get("EXPLORE"),
    database=None,
)
settings.load_profile("suite")


@pytest.fixture(scope="session", autouse=True)
def _torch_is_loaded_once() -> Iterator[None]:
    """Models of engines in this process compute in it, unless a test says otherwise: a process for each of
    them would load torch anew. Servers that tests start have one."""
    from runtime.processes import loading

    whole = loading.own_process

    @functools.wraps(whole)
    def here(config):  # type: ignore[no-untyped-def]
        return bool(config.runner_process) and whole(config)

    loading.own_process = here
    yield
    loading.own_process = whole
