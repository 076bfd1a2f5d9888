"""process/server/test_fuzz.py, at length."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.process.server.test_fuzz import test_no_request_is_answered_with_a_500 as check

SECONDS = float(os.environ.get("FUZZ_SECONDS", "600"))


@pytest.mark.timeout(SECONDS + 1800)
@pytest.mark.filterwarnings("ignore::hypothesis.errors.NonInteractiveExampleWarning")
def test_no_request_is_answered_with_a_500(
    start_server: Callable[..., Any], wait_idle: Callable[..., None], tmp_path: Path
) -> None:
    check(start_server, wait_idle, tmp_path, SECONDS, 4)
