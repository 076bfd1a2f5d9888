"""The tokens of a generated text, each with the stretch of text that it stands for. Knows no way of showing
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BROKEN = "\ufffd"
"""In the text of a token: bytes that are no whole character without its neighbours."""
_REACH = 16
"""How many characters one token without a text of its own may stand for."""


@dataclass(frozen=True, slots=True)
class Token:
    """`logprob`: None where it is not known. `origin`: sampled, forced or speculated; "" where the backend
    does not say. `others`: the likeliest tokens at its place, it may be among them, and their
    log-probabilities."""

    text: str
    logprob: float | None
    origin: str = ""
    others: tuple[tuple[str, float], ...] = ()

    @property
    def probability(self) -> float | None:
        return None if self.logprob is None else math.exp(min(0.0, self.logprob))


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the text, and the tokens it is made of: mostly one; several where a character has more
    than one; none where it is not known."""

    text: str
    tokens: tuple[Token, ...]

    @property
    def probability(self) -> float | None:
        """Of all its tokens."""
        found = [token.probability for token in self.tokens]
        known = [one for one in found if one is not None]
        return math.prod(known) if known and len(known) == len(found) else None


def tokens_of(meta: Mapping[str, Any]) -> tuple[Token, ...]:
    """What a call's meta tells of its tokens; () where their texts are not in it."""
    told = _list(meta.get("output_token_logprobs"))
    tops = _list(meta.get("output_top_logprobs"))
    origins = _list(meta.get("output_token_origins"))
    found: list[Token] = []
    for at, entry in enumerate(told):
        if not (isinstance(entry, Sequence) and len(entry) == 3 and isinstance(entry[2], str)):
            return ()
        others = tuple(
            (one[2], float(one[0]))
            for one in (_list(tops[at]) if at < len(tops) else ())
            if len(one) == 3 and isinstance(one[2], str) and one[0] is not None
        )
        origin = str(origins[at]) if at < len(origins) else ""
        logprob = None if entry[0] is None else float(entry[0])
        found.append(Token(entry[2], logprob, origin, others))
    return tuple(found)


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def spans(text: str, tokens: Sequence[Token], skip: int = 0) -> list[Span]:
    """`text` without its first `skip` characters, cut where tokens meet; the pieces add up to it whatever
    the tokens say. Tokens that are not part of the text (special ones, what stands behind a stop string)
    are in none of them."""
    made: list[Span] = []
    at = 0
    for span in _cut(text, tokens):
        end = at + len(span.text)
        if end > skip:
            made.append(Span(text[max(at, skip) : end], span.tokens))
        at = end
    return made


def _cut(text: str, tokens: Sequence[Token]) -> Iterator[Span]:
    at = 0
    waiting: list[Token] = []  # whose place is not known yet
    for token in tokens:
        said = token.text
        if at == 0 and not waiting and said and not text.startswith(said):
            # The first one may begin with a space that is not shown, or with the end of the prompt.
            said = next((said[cut:] for cut in range(1, len(said)) if text.startswith(said[cut:])), said)
        place = -1
        if said and BROKEN not in said:
            place = text.find(said, at, at + len(said) + _REACH * len(waiting))
        if place < 0:
            waiting.append(token)
            continue
        if place > at:
            yield Span(text[at:place], tuple(waiting))
        waiting.clear()
        yield Span(said, (token,))
        at = place + len(said)
    if at < len(text):
        yield Span(text[at:], tuple(waiting))
