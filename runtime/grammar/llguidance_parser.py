"""Parser: the llguidance library's parser, whose failures concern one constraint.

A defect in the library ends in what Rust calls a panic, and Python sees as an exception that
`except Exception` lets through: a whole server would end with it. Here it becomes an InternalFault. It knows
no vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer
from llguidance._lib import LLParserLimits

from runtime.protocol.errors import InternalFault

_T = TypeVar("_T")
_PANIC = "PanicException"


def guarded(where: str, call: Callable[..., _T], *given: object) -> _T:
    """call(*given). Raises InternalFault for a panic."""
    try:
        return call(*given)
    except BaseException as error:  # a panic is no Exception; all others go on as they are
        if type(error).__name__ != _PANIC:
            raise
        text = " ".join(str(error).split())[:300]
        raise InternalFault(f"the grammar library failed: {text}", where=where) from None


class Parser:
    """The calls of LLMatcher that are used here; each may raise InternalFault. `where`: for its message."""

    def __init__(self, inner: LLMatcher, where: str) -> None:
        self._inner, self._where = inner, where

    @classmethod
    def start(cls, tokenizer: LLTokenizer, grammar: str, limits: LLParserLimits, where: str) -> Parser:
        return cls(guarded(where, lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=limits)), where)

    def try_consume_tokens(self, ids: Sequence[int]) -> int:
        """How many of `ids` follow; those are taken."""
        return guarded(self._where, self._inner.try_consume_tokens, ids)

    def validate_tokens(self, ids: Sequence[int]) -> int:
        """How many of `ids` would follow; none is taken."""
        return guarded(self._where, self._inner.validate_tokens, ids)

    def compute_mask(self, address: int, size: int) -> None:
        """Write the mask, as packed bits, to `size` bytes of memory at `address`."""
        guarded(self._where, self._inner.unsafe_compute_mask_ptr, address, size)

    def rollback(self, tokens: int) -> None:
        guarded(self._where, self._inner.rollback, tokens)

    def compute_ff_bytes(self) -> bytes:
        return guarded(self._where, self._inner.compute_ff_bytes)

    def is_accepting(self) -> bool:
        return guarded(self._where, self._inner.is_accepting)

    def is_stopped(self) -> bool:
        return guarded(self._where, self._inner.is_stopped)

    def is_error(self) -> bool:
        return guarded(self._where, self._inner.is_error)

    def get_error(self) -> str:
        return guarded(self._where, self._inner.get_error)

    def copy(self) -> Parser:
        return Parser(guarded(self._where, self._inner.deep_copy), self._where)
