"""long/runtime/engine/test_lookahead.py, at length."""

from __future__ import annotations

from typing import Any

import pytest

from tests.long.runtime.engine.test_lookahead import Load, load
from tests.long.runtime.engine.test_lookahead import test_no_answer_changes as check

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinity, in the interpreter


@pytest.mark.parametrize("seed", range(4, 64))  # 2,000 requests
@pytest.mark.parametrize("name", ["llama", "qwen2, upper layers windowed"])
def test_no_answer_changes(
    tiny: Any, drive: Any, prompt: Any, load: Load, monkeypatch: pytest.MonkeyPatch, name: str, seed: int
) -> None:
    check(tiny, drive, prompt, load, monkeypatch, name, seed)
