"""The fixtures of tests/unit/sglang_dsl."""

from tests.unit.sglang_dsl.conftest import _nothing_under_way, _settings, idle, young

__all__ = ["_nothing_under_way", "_settings", "idle", "young"]
