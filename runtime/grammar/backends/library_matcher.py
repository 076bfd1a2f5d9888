"""What backends over another library share: a vocabulary in which every byte is a token, and a matcher over
the library's parser.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

from runtime.grammar.base import Matcher, Origin, Step, last_steps
from runtime.grammar.masks.token_bits import token_bits
from runtime.plan import TokenMask
from runtime.protocol.vocabulary import Vocabulary


class LibrarySpace:
    """A vocabulary prepared for a library, shared by all constraints. Thread-safe.

    tokens    the texts by the library's ids: those of the vocabulary, then one for each byte that no token
              spells, so that any text can be followed, and one more if the vocabulary has no end
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.bits = token_bits(vocabulary)
        self.lacks_bytes = len(self.bits.single_bytes) < 256
        self.tokens = list(self.bits.texts)
        spelled = {data[0]: number for number, data in enumerate(self.tokens) if len(data) == 1}
        for value in range(256):
            if value not in spelled:
                spelled[value] = len(self.tokens)
                self.tokens.append(bytes([value]))
        self.byte_ids = [spelled[value] for value in range(256)]
        self.ends = sorted(vocabulary.eos) or [len(self.tokens)]
        if not vocabulary.eos:
            self.tokens.append(b"")
        self.word_count = -(-len(self.tokens) // 32)


class LibraryMatcher(Matcher):
    """A position in a grammar of a library. The library never sees the end of a text: after an eos only an
    eos may follow, which changes nothing."""

    def __init__(self, space: LibrarySpace, origin: Origin, parser: Any) -> None:
        self._space, self._parser = space, parser
        self.vocabulary, self.origin = space.vocabulary, origin
        self._last: Step[tuple[int, bool]] | None = None  # steps of the library, whether the text had ended
        self._stopped = False
        self._mask: TokenMask | None = None

    @abstractmethod
    def _take_token(self, token: int) -> bool: ...

    @abstractmethod
    def _take_bytes(self, data: bytes) -> int | None:
        """How many of the library's steps `data` takes; None, and no change, if it is not allowed."""

    @abstractmethod
    def _compute(self) -> TokenMask:
        """The mask of a text that has not ended."""

    @abstractmethod
    def _twin(self) -> Self:
        """A new matcher with a copy of the parser."""

    def advance(self, token: int) -> bool:
        bits = self._space.bits
        if token in bits.vocabulary.eos:
            return self._done(0, stopped=True) if self.may_stop() else False
        if self._stopped or not 0 <= token < bits.width or not bits.texts[token]:
            return False
        return self._take_token(token) and self._done(1)

    def advance_bytes(self, data: bytes) -> bool:
        if self._stopped:
            return self._done(0, stopped=True) if not data else False
        taken = self._take_bytes(data) if data else 0
        return False if taken is None else self._done(taken)

    def _done(self, taken: int, *, stopped: bool = False) -> bool:
        self._last = Step((taken, self._stopped), self._last)
        self._stopped = stopped
        if taken:
            self._mask = None
        return True

    def mask(self) -> TokenMask:
        if self._stopped:
            return self._space.bits.stop_only
        if self._mask is None:
            self._mask = self._compute()
        return self._mask

    def rollback(self, steps: int) -> None:
        undone = last_steps(self._last, steps)
        if taken := sum(step.state[0] for step in undone):
            self._parser.rollback(taken)
            self._mask = None
        if undone:
            (_, self._stopped), self._last = undone[-1]

    def copy(self) -> Self:
        twin = self._twin()
        twin._last, twin._stopped, twin._mask, twin.origin = (
            self._last, self._stopped, self._mask, self.origin,
        )  # fmt: skip
        return twin
