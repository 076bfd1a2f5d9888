"""When a generation ends: pure functions of what was produced. Knows no queues, slots or text decoding.

Per token, in this order: stop strings and stop patterns, end-of-text and stop ids, max_new_tokens, the
grammar's end. Output ids always include the token that ended the generation: a matched id is the last id, and
so is the token in which a stop string or pattern became complete. Cutting the text is the detokeniser's work:
FinishReason.matched says at what.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from runtime.grammar.search import Place, Search
from runtime.protocol.errors import BadConstraint
from runtime.protocol.io_struct import FinishReason
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary

LENGTH = FinishReason(type="length")
STOP = FinishReason(type="stop")


@lru_cache(maxsize=128)
def search_of(patterns: tuple[str, ...]) -> Search:
    """The search for stop_regex patterns; requests with the same ones share it. Raises BadConstraint, naming
    the pattern."""
    try:
        return Search(patterns)
    except BadConstraint as error:
        fault = _placed(error, "sampling_params.stop_regex")
    for index, pattern in enumerate(patterns):
        try:
            Search((pattern,))
        except BadConstraint as error:
            raise _placed(error, f"sampling_params.stop_regex[{index}]") from None
    raise fault


def _placed(error: BadConstraint, where: str) -> BadConstraint:
    return type(error)(error.message, where=where, hint=error.hint)


class Seen(NamedTuple):
    """What is remembered of the text so far, a value: an earlier one may be gone back to.

    tail      bytes in which a stop string may have begun
    place     where the search for patterns is
    broken    bytes of an unfinished character, not searched yet
    """

    tail: bytes = b""
    place: Place | None = None
    broken: bytes = b""


NOTHING_SEEN = Seen()


@dataclass(frozen=True, slots=True)
class StopRule:
    """One request's conditions. `ids`: end it when sampled. `strings`: the stop strings with their UTF-8
    bytes, longest first. `window`: how many bytes of earlier text a stop string may begin in. `search`: for
    its patterns. Bytes are those of the vocabulary, control tokens' included where it has some, so a control
    token can be named as a stop string."""

    ids: frozenset[int]
    strings: tuple[tuple[bytes, str], ...]
    window: int
    max_new_tokens: int
    min_new_tokens: int
    search: Search | None = None

    @classmethod
    def of(cls, params: SamplingParams, vocabulary: Vocabulary) -> StopRule:
        """Raises BadConstraint for a pattern that cannot be kept."""
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
        """Ids that must not be sampled as the next token, because min_new_tokens is not reached yet."""
        return self.ids if produced < self.min_new_tokens else frozenset()

    def read(self, seen: Seen, text: bytes) -> tuple[str | None, Seen]:
        """The stop string, or the text of a pattern's match, that `text` completes after what was seen, and
        what is to be remembered for the next call.

        The one that is complete first, as if the text came byte by byte; then the longest string. So the
        answer does not depend on how the text falls into tokens.
        """
        end, matched, tail = self._string(seen.tail, text)
        if self.search is None:
            return matched, Seen(tail)
        place = self.search.begin if seen.place is None else seen.place
        chars, broken = _decode(seen.broken + text)
        place, found = self.search.feed(place, chars)
        if found is not None:
            over = len(broken) + len(_bytes(chars[len(chars) - found.after :]))
            if matched is None or len(text) - over < end:
                matched = _bytes(found.text).decode(errors="replace")
        return matched, Seen(tail, place, broken)

    def match_text(self, tail: bytes, text: bytes) -> tuple[str | None, bytes]:
        """The stop string that `text` completes after `tail`, and the tail for the next call."""
        _, matched, rest = self._string(tail, text)
        return matched, rest

    def _string(self, tail: bytes, text: bytes) -> tuple[int, str | None, bytes]:
        """How many bytes of `text` it takes to complete a stop string, which one, and the tail."""
        if not self.strings:
            return 0, None, b""
        seen = tail + text
        best: tuple[int, str] | None = None
        for data, stop in self.strings:
            at = seen.find(data)  # not within `tail`: there it would have been found before
            if at >= 0 and (best is None or at + len(data) < best[0]):
                best = (at + len(data), stop)
        rest = seen[max(0, len(seen) - self.window) :]
        return (0, None, rest) if best is None else (best[0] - len(tail), best[1], rest)

    def finish(
        self, token: int, matched: str | None, produced: int, grammar_done: bool
    ) -> FinishReason | None:
        """Whether `token`, the `produced`-th one, ends the generation. `matched`: what was found in the text
        with it."""
        if matched is not None:
            return FinishReason(type="stop", matched=matched)
        if token in self.ids:
            return FinishReason(type="stop", matched=token)
        if produced >= self.max_new_tokens:
            return LENGTH
        return STOP if grammar_done else None


def _decode(data: bytes) -> tuple[str, bytes]:
    """The characters of `data`, a surrogate for each byte that belongs to none, and the bytes of one that may
    go on."""
    text, used = codecs.utf_8_decode(data, "surrogateescape", False)
    return text, data[used:]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
