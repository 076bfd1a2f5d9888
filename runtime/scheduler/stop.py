"""When a generation ends: pure functions of what was produced. Knows no queues, slots or text decoding.

Per token, in this order: end-of-text and stop ids, stop strings, max_new_tokens, the grammar's end. Output
ids always include the token that ended the generation: a matched id is the last id, and so is the token in
which a stop string became complete. Cutting the text is the detokeniser's work: FinishReason.matched says at
what.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.protocol.io_struct import FinishReason
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary

LENGTH = FinishReason(type="length")
STOP = FinishReason(type="stop")


@dataclass(frozen=True, slots=True)
class StopRule:
    """One request's conditions. `ids`: end it when sampled. `strings`: the stop strings with their UTF-8
    bytes, longest first. `window`: how many bytes of earlier text a stop string may begin in. Bytes are
    those of the vocabulary, control tokens' included where it has some, so a control token can be named as a
    stop string."""

    ids: frozenset[int]
    strings: tuple[tuple[bytes, str], ...]
    window: int
    max_new_tokens: int
    min_new_tokens: int

    @classmethod
    def of(cls, params: SamplingParams, vocabulary: Vocabulary) -> StopRule:
        encoded = [(text.encode("utf-8", "surrogatepass"), text) for text in params.stop]
        encoded.sort(key=lambda pair: -len(pair[0]))
        return cls(
            ids=frozenset() if params.ignore_eos else vocabulary.eos | frozenset(params.stop_token_ids),
            strings=tuple(encoded),
            window=max((len(data) for data, _ in encoded), default=1) - 1,
            max_new_tokens=params.max_new_tokens,
            min_new_tokens=params.min_new_tokens,
        )

    def masked_ids(self, produced: int) -> frozenset[int]:
        """Ids that must not be sampled as the next token, because min_new_tokens is not reached yet."""
        return self.ids if produced < self.min_new_tokens else frozenset()

    def match_text(self, tail: bytes, text: bytes) -> tuple[str | None, bytes]:
        """The stop string that `text` completes after `tail`, and the tail for the next call.

        Of several, the one that is complete first, as if the text came byte by byte; then the longest. So
        the answer does not depend on how the text falls into tokens.
        """
        if not self.strings:
            return None, b""
        seen = tail + text
        best: tuple[int, str] | None = None
        for data, stop in self.strings:
            at = seen.find(data)  # not within `tail`: there it would have been found before
            if at >= 0 and (best is None or at + len(data) < best[0]):
                best = (at + len(data), stop)
        return (best[1] if best else None), seen[max(0, len(seen) - self.window) :]

    def finish(
        self, token: int, matched: str | None, produced: int, grammar_done: bool
    ) -> FinishReason | None:
        """Whether `token`, the `produced`-th one, ends the generation. `matched`: what match_text said about
        it."""
        if token in self.ids:
            return FinishReason(type="stop", matched=token)
        if matched is not None:
            return FinishReason(type="stop", matched=matched)
        if produced >= self.max_new_tokens:
            return LENGTH
        return STOP if grammar_done else None
