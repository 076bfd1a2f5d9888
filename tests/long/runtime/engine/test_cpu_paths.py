"""unit/runtime/engine/test_cpu_paths.py, at length."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.runtime.engine.test_cpu_paths import test_they_change_no_token as check


def test_they_change_no_token(tiny: Any, drive: Any, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tiny, drive, prompt, monkeypatch, 2000)
