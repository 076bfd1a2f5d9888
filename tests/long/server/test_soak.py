"""process/server/test_soak.py, at length."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.process.server.test_soak import test_mixed_load_leaves_nothing_behind as check

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "5000"))


@pytest.mark.timeout(3600)
def test_mixed_load_leaves_nothing_behind(
    start_server: Callable[..., Any], wait_idle: Callable[..., None]
) -> None:
    check(start_server, wait_idle, REQUESTS)
