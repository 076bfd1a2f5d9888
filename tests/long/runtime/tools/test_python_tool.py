"""process/runtime/tools/test_python_tool.py, at length."""

from __future__ import annotations

import sys

import pytest

from tests.process.runtime.tools.test_python_tool import test_what_does_not_end as check


@pytest.mark.skipif(sys.platform != "linux", reason="namespaces and Landlock are Linux's")
@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(600)"])
def test_what_does_not_end(code: str) -> None:
    check(code)
