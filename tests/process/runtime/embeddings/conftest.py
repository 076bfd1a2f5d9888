"""The fixtures of tests/unit/runtime/embeddings."""

from tests.unit.runtime.embeddings.conftest import _one_thread, case, classifier, make, tiny

__all__ = ["_one_thread", "case", "classifier", "make", "tiny"]
