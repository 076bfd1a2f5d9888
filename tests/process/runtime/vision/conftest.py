"""The fixtures of tests/unit/runtime/vision."""

from tests.unit.runtime.vision.conftest import _one_thread, checkpoint

__all__ = ["_one_thread", "checkpoint"]
