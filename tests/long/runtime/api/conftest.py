"""The fixtures of tests/process/runtime/api."""

from tests.process.runtime.api.conftest import checkpoint, engine, reference

__all__ = ["checkpoint", "engine", "reference"]
