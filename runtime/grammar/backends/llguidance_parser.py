"""Parser: the llguidance library's parser, whose failures concern one constraint only; and LLSpace, a
vocabulary prepared for the library.

A panic of the library is no `Exception` and would end the whole server; here it becomes an InternalFault. All
copies of one matcher share a lexer whose states and work are bounded; once a bound is met it refuses
everything. Then the constraint gets a new lexer, and each copy follows its text again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from llguidance._lib import LLParserLimits

from runtime.grammar.backends.library_matcher import LibrarySpace
from runtime.grammar.json_schema.checks.checked import ClosingTokens
from runtime.protocol.errors import InternalFault
from runtime.protocol.vocabulary import Vocabulary

_T = TypeVar("_T")
_PANIC = "PanicException"
_PIECES = (64, 8, 1)
"""Tokens between two masks when a text is followed again. Each mask allows the lexer new work, so fewer
tokens mean more work for each."""
_INSIDE = r'[^"\\\x00-\x1F\x7F]'
"""Characters of strings that stand for themselves: of tokens of these the library allows or refuses all, or
all that are short, at once."""


class _ByteTokenizer:
    """A vocabulary in the shape that LLTokenizer needs. It never tokenizes: only bytes are fed back."""

    def __init__(self, space: LibrarySpace) -> None:
        self.tokens = space.tokens
        self.eos_token_id = space.ends[0]
        self.bos_token_id = None
        self.special_token_ids: list[int] = []
        self._byte_ids = space.byte_ids

    def __call__(self, text: bytes | str) -> list[int]:
        return [self._byte_ids[value] for value in (text.encode() if isinstance(text, str) else text)]


class LLSpace(LibrarySpace):
    """A vocabulary prepared for llguidance."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary)
        self.tokenizer = LLTokenizer(
            TokenizerWrapper(_ByteTokenizer(self)),
            n_vocab=len(self.tokens),
            eos_token=self.ends,
            slices=[_INSIDE + "{1,10}", _INSIDE + "+"],
        )
        self.closing_tokens = ClosingTokens(self.bits)


def guarded(kind: str, call: Callable[..., _T], *arguments: object) -> _T:
    """call(*arguments). Raises InternalFault for a panic, about a constraint of this kind."""
    try:
        return call(*arguments)
    except BaseException as error:  # a panic is no Exception; all others go on as they are
        if type(error).__name__ != _PANIC:
            raise
        text = " ".join(str(error).split())[:300]
        raise InternalFault(f"the grammar library failed: {text}", where=kind) from None


class _Start:
    """The library's matcher at the start of a grammar, shared by all its parsers. Thread-safe."""

    def __init__(self, make: Callable[[], LLMatcher]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._inner = make()
        self.lexer = 0
        """Number of the lexer in use."""
        self.taken: int | None = None
        """An id that it takes at the start."""

    def copy(self) -> LLMatcher:
        with self._lock:
            return self._inner.deep_copy()

    def is_spent(self) -> bool:
        """Whether the lexer in use refuses everything."""
        if self.taken is not None:
            with self._lock:
                return self._inner.validate_tokens([self.taken]) == 0
        twin = self.copy()
        twin.compute_bitmask()
        return twin.is_error()

    def renew(self, lexer: int) -> tuple[LLMatcher, int]:
        """A matcher at the start with another lexer than number `lexer`, and the number of that."""
        with self._lock:
            if lexer == self.lexer:
                self._inner = self._make()
                self.lexer += 1
            return self._inner.deep_copy(), self.lexer


class Parser:
    """The calls of LLMatcher that are used here; each may raise InternalFault. `kind`: of the constraint."""

    def __init__(self, start: _Start, inner: LLMatcher, lexer: int, ids: list[int], kind: str) -> None:
        self._start, self._inner, self._lexer, self._ids = start, inner, lexer, ids
        self.kind = kind

    @classmethod
    def start(cls, tokenizer: LLTokenizer, grammar: str, limits: LLParserLimits, kind: str) -> Parser:
        start = _Start(
            lambda: guarded(kind, lambda: LLMatcher(tokenizer, grammar, log_level=0, limits=limits))
        )
        return cls(start, guarded(kind, start.copy), 0, [], kind)

    def try_consume_tokens(self, ids: Sequence[int]) -> int:
        """How many of `ids` follow; those are taken."""
        self._keep_up()
        taken = guarded(self.kind, self._inner.try_consume_tokens, ids)
        if taken and not self._ids:
            self._start.taken = ids[0]
        self._ids += ids[:taken]
        if taken < len(ids) and self._is_spent():
            known = len(self._ids)
            self._follow_again(ids[taken:])
            taken += len(self._ids) - known
        return taken

    def compute_mask(self, address: int, size: int) -> None:
        """Write the mask, as packed bits, to `size` bytes of memory at `address`."""
        self._keep_up()
        guarded(self.kind, self._inner.unsafe_compute_mask_ptr, address, size)
        if self.is_error() and self._is_spent():
            self._follow_again()
            guarded(self.kind, self._inner.unsafe_compute_mask_ptr, address, size)

    def rollback(self, tokens: int) -> None:
        self._keep_up()
        guarded(self.kind, self._inner.rollback, tokens)
        del self._ids[len(self._ids) - tokens :]

    def compute_ff_bytes(self) -> bytes:
        self._keep_up()
        return guarded(self.kind, self._inner.compute_ff_bytes)

    def is_accepting(self) -> bool:
        return guarded(self.kind, self._inner.is_accepting)

    def is_stopped(self) -> bool:
        return guarded(self.kind, self._inner.is_stopped)

    def is_error(self) -> bool:
        return guarded(self.kind, self._inner.is_error)

    def get_error(self) -> str:
        return guarded(self.kind, self._inner.get_error)

    def copy(self) -> Parser:
        twin = guarded(self.kind, self._inner.deep_copy)
        return Parser(self._start, twin, self._lexer, list(self._ids), self.kind)

    def _is_spent(self) -> bool:
        return guarded(self.kind, self._start.is_spent)

    def _keep_up(self) -> None:
        """Change to the new lexer if another copy renewed it."""
        if self._lexer != self._start.lexer:
            self._follow_again()

    def _follow_again(self, more: Sequence[int] = ()) -> None:
        """Follow the text so far with a new lexer, and as many of `more` as fit. If that is too much work for
        one lexer, is_error()."""
        ids, known = [*self._ids, *more], len(self._ids)
        for piece in _PIECES:
            self._inner, self._lexer = guarded(self.kind, self._start.renew, self._lexer)
            taken = self._follow(ids, piece)
            if taken == len(ids) or (taken >= known and not self.is_error() and not self._is_spent()):
                break
        else:
            guarded(self.kind, self._inner.compute_bitmask)  # the error may have gone to another copy
        self._ids = ids[: max(taken, known)]

    def _follow(self, ids: list[int], piece: int) -> int:
        taken = 0
        while taken < len(ids) and not self.is_error():
            guarded(self.kind, self._inner.compute_bitmask)
            some = ids[taken : taken + piece]
            more = guarded(self.kind, self._inner.try_consume_tokens, some)
            taken += more
            if more < len(some):
                break
        return taken
