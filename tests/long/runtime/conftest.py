"""The fixtures of tests/unit/runtime."""

from tests.unit.runtime.conftest import pace

__all__ = ["pace"]
