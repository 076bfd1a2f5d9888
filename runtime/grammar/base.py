"""Matcher and GrammarBackend: what the scheduler knows of constrained decoding.

Byte-level: a matcher follows the bytes of the output. It does not know the prompt, the model or any tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from runtime.plan import TokenMask
from runtime.protocol.constraint import Constraint
from runtime.protocol.vocabulary import Vocabulary


class Matcher(ABC):
    """The state of one constrained generation. Cheap to copy; the compiled part is shared and never
    changes."""

    @abstractmethod
    def advance(self, token: int) -> bool:
        """Follow one token. False, and no change, if it is not allowed. An eos id is allowed where
        may_stop()."""

    @abstractmethod
    def advance_bytes(self, data: bytes) -> bool:
        """Follow raw bytes (forced text). False, and no change, if they are not allowed."""

    @abstractmethod
    def mask(self) -> TokenMask:
        """The ids allowed now, eos included where may_stop(). The arrays are shared: read only."""

    @abstractmethod
    def forced_bytes(self) -> bytes:
        """The longest unique byte path from here, b"" when there is a choice (stopping counts as one)."""

    @abstractmethod
    def may_stop(self) -> bool:
        """Whether what was matched so far is a whole match."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether nothing can follow: an eos was taken, or a whole match allows no further byte."""

    @abstractmethod
    def rollback(self, steps: int) -> None:
        """Undo the last `steps` successful advance/advance_bytes calls."""

    @abstractmethod
    def copy(self) -> Matcher:
        """An independent matcher in the same state."""


class GrammarBackend(ABC):
    """Compiles constraints for one vocabulary."""

    name: str

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def compile(self, constraint: Constraint) -> Matcher:
        """A fresh matcher. Raises BadConstraint (cannot be compiled: where and why) or
        UnsupportedConstraint."""
