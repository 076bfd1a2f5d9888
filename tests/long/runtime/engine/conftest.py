"""The fixtures of tests/unit/runtime/engine."""

from tests.unit.runtime.engine.conftest import _one_thread, case, drive, make, prompt, tiny

__all__ = ["_one_thread", "case", "drive", "make", "prompt", "tiny"]
