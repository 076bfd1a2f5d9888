"""Fixtures of the language's tests: settings that are put back, and a way to wait for the loop to be idle."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator

import pytest

from sglang_dsl.loop import background
from sglang_dsl.settings import global_config


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Every test begins without a default backend and leaves the settings as they were."""
    before = dataclasses.replace(global_config)
    global_config.default_backend = None
    yield
    for field in dataclasses.fields(before):
        setattr(global_config, field.name, getattr(before, field.name))


@pytest.fixture
def idle() -> Callable[[], int]:
    """Waits up to a minute until no task runs on the language's loop; gives the number still running."""

    def wait() -> int:
        gc.collect()
        deadline = time.monotonic() + 60
        while background().task_count and time.monotonic() < deadline:
            time.sleep(0.005)
        return background().task_count

    return wait
