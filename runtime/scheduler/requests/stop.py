"""When a generation ends: pure functions of its output. Knows no queues, slots or text decoding.

Checked for each token, in this order: stop strings and stop patterns, end-of-text and stop ids,
max_new_tokens, the grammar's end. Output ids include the token that ended the generation: a matched id, or
the token that completed a stop string or pattern. The detokenizer cuts the text at FinishReason.matched.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from runtime.grammar.search import Search, SearchState
from runtime.protocol.errors import BadConstraint
from runtime.protocol.io_struct import FinishReason
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary

LENGTH = FinishReason(type="length")
STOP = FinishReason(type="stop")


@lru_cache(maxsize=128)
def search_of(patterns: tuple[str, ...]) -> Search:
    """The search for stop_regex patterns, shared. Raises BadConstraint, naming the pattern."""
    try:
        return Search(patterns)
    except BadConstraint as error:
        fault = _at(error, "sampling_params.stop_regex")
    for index, pattern in enumerate(patterns):
        try:
            Search((pattern,))
        except BadConstraint as error:
            raise _at(error, f"sampling_params.stop_regex[{index}]") from None
    raise fault


def _at(error: BadConstraint, field: str) -> BadConstraint:
    return type(error)(error.message, where=field, hint=error.hint)


class Seen(NamedTuple):
    """What is remembered of the text so far; immutable, so that output can be taken back.

    tail      bytes in which a stop string may have begun
    state     of the search for patterns
    broken    bytes of an unfinished character, not searched yet
    """

    tail: bytes = b""
    state: SearchState | None = None
    broken: bytes = b""


NOTHING_SEEN = Seen()


@dataclass(frozen=True, slots=True)
class StopRule:
    """One request's conditions. `ids`: end it when sampled. `strings`: the stop strings with their UTF-8
    bytes, longest first. `window`: how many bytes of earlier text a stop string may begin in. `search`: for
    its patterns. Bytes are those of the vocabulary, control tokens included, so a control token can be a stop
    string."""

    ids: frozenset[int]
    strings: tuple[tuple[bytes, str], ...]
    window: int
    max_new_tokens: int
    min_new_tokens: int
    search: Search | None = None

    @classmethod
    def of(cls, params: SamplingParams, vocabulary: Vocabulary) -> StopRule:
        """Raises BadConstraint for a pattern that is not supported."""
        encoded = [(text.encode("utf-8", "surrogatepass"), text) for text in params.stop]
        encoded.sort(key=lambda pair: -len(pair[0]))
        return cls(
            ids=frozenset() if params.ignore_eos else vocabulary.eos | frozenset(params.stop_token_ids),
            strings=tuple(encoded),
            window=max((len(data) for data, _ in encoded), default=1) - 1,
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
            search=search_of(params.stop_regex) if params.stop_regex else None,
        )

    @property
    def reads_text(self) -> bool:
        return bool(self.strings) or self.search is not None

    def masked_ids(self, produced: int) -> frozenset[int]:
        """Ids that min_new_tokens forbids as the next token."""
        return self.ids if produced < self.min_new_tokens else frozenset()

    def read(self, seen: Seen, text: bytes) -> tuple[str | None, Seen]:
        """The stop string, or the text of a pattern's match, that `text` completes, and the Seen for the next
        call. The one that is complete first, as if the text came byte by byte, then the longest string: so
        the result does not depend on how the text is split into tokens."""
        end, matched, tail = self._string(seen.tail, text)
        if self.search is None:
            return matched, Seen(tail)
        state = self.search.begin if seen.state is None else seen.state
        chars, broken = _decode(seen.broken + text)
        state, match = self.search.feed(state, chars)
        if match is not None:
            behind = len(broken) + len(_bytes(chars[len(chars) - match.after :]))
            if matched is None or len(text) - behind < end:
                matched = _bytes(match.text).decode(errors="replace")
        return matched, Seen(tail, state, broken)

    def _string(self, tail: bytes, text: bytes) -> tuple[int, str | None, bytes]:
        """How many bytes of `text` it takes to complete a stop string, which one, and the tail."""
        if not self.strings:
            return 0, None, b""
        seen = tail + text
        best: tuple[int, str] | None = None
        for data, stop in self.strings:
            at = seen.find(data)  # not within `tail`: there it would have matched before
            if at >= 0 and (best is None or at + len(data) < best[0]):
                best = (at + len(data), stop)
        rest = seen[max(0, len(seen) - self.window) :]
        return (0, None, rest) if best is None else (best[0] - len(tail), best[1], rest)

    def finish(
        self, token: int, matched: str | None, produced: int, grammar_done: bool
    ) -> FinishReason | None:
        """Whether `token`, the `produced`-th one, ends the generation. `matched`: the result of read()."""
        if matched is not None:
            return FinishReason(type="stop", matched=matched)
        if token in self.ids:
            return FinishReason(type="stop", matched=token)
        if produced >= self.max_new_tokens:
            return LENGTH
        return STOP if grammar_done else None


def _decode(data: bytes) -> tuple[str, bytes]:
    """The characters of `data`, a surrogate for each stray byte, and the bytes of an unfinished one."""
    text, used = codecs.utf_8_decode(data, "surrogateescape", False)
    return text, data[used:]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
