"""The fixtures of tests/unit/runtime/api."""

from tests.unit.runtime.api.conftest import checkpoint, engine, reference

__all__ = ["checkpoint", "engine", "reference"]
