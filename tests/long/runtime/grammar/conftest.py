"""The fixtures of tests/unit/runtime/grammar."""

from tests.unit.runtime.grammar.conftest import _searches_end_by_their_work, accepts, tokenizer, trained

__all__ = ["_searches_end_by_their_work", "accepts", "tokenizer", "trained"]
