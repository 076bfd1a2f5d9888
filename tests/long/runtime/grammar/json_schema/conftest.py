"""The fixtures of tests/unit/runtime/grammar/json_schema."""

from tests.unit.runtime.grammar.json_schema.conftest import small

__all__ = ["small"]
