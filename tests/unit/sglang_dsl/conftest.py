"""Fixtures of the language's tests: settings that are put back, and a way to wait for the loop to be idle."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterator

import pytest

from sglang_dsl.concurrency.loop import LoopThread, background, running
from sglang_dsl.settings import global_config


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    """Every test begins without a default backend and leaves the settings as they were."""
    before = dataclasses.replace(global_config)
    global_config.default_backend = None
    yield
    for field in dataclasses.fields(before):
        setattr(global_config, field.name, getattr(before, field.name))


@pytest.fixture(autouse=True)
def _nothing_under_way() -> Iterator[None]:
    """What a test has begun ends before the next one begins, which may look at all calls there are."""
    yield
    loop = running()
    assert loop is None or _left(loop) == 0


def _left(loop: LoopThread) -> int:
    """Waits up to a minute until no task runs on the loop; gives the number still running."""
    deadline = time.monotonic() + 60
    while loop.task_count and time.monotonic() < deadline:
        time.sleep(0.002)
    return loop.task_count


@pytest.fixture
def young() -> Iterator[None]:
    """gc.collect() looks only at what this test has made: at all there is, it takes most of a second."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def idle(young: None) -> Callable[[], int]:
    """Waits up to a minute until no task runs on the language's loop; gives the number still running."""

    def wait() -> int:
        gc.collect()
        return _left(background())

    return wait
