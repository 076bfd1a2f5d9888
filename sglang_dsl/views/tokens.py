"""The tokens of a generated text, each with the part of the text that it stands for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

REPLACEMENT = "\ufffd"
"""Stands in a token's text for bytes that are no character without the neighbouring tokens."""
_MAX_CHARACTERS = 16
"""How many characters one token without a text of its own may stand for."""


class Token(NamedTuple):
    """`logprob`: None if not known. `origin`: sampled, forced or speculated, "" if not known. `others`: the
    most likely tokens at its position, with log-probabilities; it may be among them."""

    text: str
    logprob: float | None
    origin: str = ""
    others: tuple[tuple[str, float], ...] = ()

    @property
    def probability(self) -> float | None:
        return None if self.logprob is None else math.exp(min(0.0, self.logprob))


class Span(NamedTuple):
    """A part of the text and its tokens: one, several for one character, none if not known."""

    text: str
    tokens: tuple[Token, ...]

    @property
    def probability(self) -> float | None:
        known = [one for token in self.tokens if (one := token.probability) is not None]
        return math.prod(known) if known and len(known) == len(self.tokens) else None


def tokens_of(meta: Mapping[str, Any]) -> tuple[Token, ...]:
    """The tokens in a call's metadata; () if it does not have their texts."""
    tops = _list(meta.get("output_top_logprobs"))
    origins = _list(meta.get("output_token_origins"))
    tokens: list[Token] = []
    for at, entry in enumerate(_list(meta.get("output_token_logprobs"))):
        if not (isinstance(entry, Sequence) and len(entry) == 3 and isinstance(entry[2], str)):
            return ()
        others = tuple(
            (one[2], float(one[0]))
            for one in (_list(tops[at]) if at < len(tops) else ())
            if len(one) == 3 and isinstance(one[2], str) and one[0] is not None
        )
        origin = str(origins[at]) if at < len(origins) else ""
        tokens.append(Token(entry[2], None if entry[0] is None else float(entry[0]), origin, others))
    return tuple(tokens)


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def spans(text: str, tokens: Sequence[Token], skip: int = 0) -> list[Span]:
    """`text` without its first `skip` characters, cut at the borders of tokens. The spans add up to the text
    whatever the tokens are; tokens that are not in it (special ones, those after a stop string) are in no
    span."""
    kept: list[Span] = []
    at = 0
    for span in _cut(text, tokens):
        end = at + len(span.text)
        if end > skip:
            kept.append(Span(text[max(at, skip) : end], span.tokens))
        at = end
    return kept


def _cut(text: str, tokens: Sequence[Token]) -> Iterator[Span]:
    at = 0
    unplaced: list[Token] = []
    for token in tokens:
        part = token.text
        if at == 0 and not unplaced and part and not text.startswith(part):
            # The first token may begin with a space that was stripped, or with the end of the prompt.
            part = next((part[cut:] for cut in range(1, len(part)) if text.startswith(part[cut:])), part)
        start = -1
        if part and REPLACEMENT not in part:
            start = text.find(part, at, at + len(part) + _MAX_CHARACTERS * len(unplaced))
        if start < 0:
            unplaced.append(token)
            continue
        if start > at:
            yield Span(text[at:start], tuple(unplaced))
        unplaced.clear()
        yield Span(part, (token,))
        at = start + len(part)
    if at < len(text):
        yield Span(text[at:], tuple(unplaced))
