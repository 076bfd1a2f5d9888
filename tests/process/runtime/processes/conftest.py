"""The fixtures of tests/unit/runtime/processes."""

from tests.unit.runtime.processes.conftest import kind, tokenizer_files

__all__ = ["kind", "tokenizer_files"]
