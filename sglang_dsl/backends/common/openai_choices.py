"""The likeliest option by a completion model's next tokens. Knows no requests."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from sglang_dsl.choices import draw, softmax
from sglang_dsl.errors import BackendError

Steps: TypeAlias = "Sequence[tuple[str, dict[str, float]]]"
"""The tokens of a completion, each with the likeliest tokens at its position and their log-probabilities."""

Picks: TypeAlias = "Callable[[dict[str, float], str], str]"
"""Chooses a token, from the tokens that continue an option with their log-probabilities, and the token that
the model wrote."""

_MOST_BLANKS = 16


def best(fits: dict[str, float], token: str) -> str:
    return max(fits, key=fits.__getitem__)


def drawn(temperature: float, random_numbers: random.Random) -> Picks:
    """The token that the model drew, if it continues an option; else a draw among those that do."""

    def pick(fits: dict[str, float], token: str) -> str:
        if token in fits:
            return token
        tokens = list(fits)
        return tokens[draw(softmax(list(fits.values()), temperature), random_numbers.getrandbits(64))]

    return pick


async def likeliest(
    ask: Callable[[str], Awaitable[Steps]], options: Sequence[str], pick: Picks | None = None
) -> tuple[int, tuple[float, ...]]:
    """Index of the option by decoding among the options (greedy without `pick`), and the log-probabilities of
    the tokens that distinguish it. `ask`: completes the prompt and a text; called again only if the model
    leaves all options. Leading blanks do not count. Raises BackendError if no likely token begins an
    option."""
    written, emitted, path = "", "", list[float]()
    left = dict.fromkeys(options)
    while True:
        before = emitted
        for token, tops in await ask(emitted):
            tops = tops or {token: 0.0}
            fits = {text: lp for text, lp in tops.items() if _goes_on(_after(written, text), written, left)}
            if not fits or (written in left and token not in fits):
                return _ended(options, written, tops), tuple(path)
            chosen = (pick or best)(fits, token)
            path.append(fits[chosen])
            done, written, emitted = len(written), _after(written, chosen), emitted + chosen
            whole = [one for one in left if len(one) > done and written.startswith(one)]
            left = {one: None for one in left if one.startswith(written)}
            if all(len(one) <= len(written) for one in left):
                return options.index(max(whole, key=len)), tuple(path)
            if len(left) == 1:
                return options.index(next(iter(left))), tuple(path)
            if chosen != token:
                break  # the model continued with another text
        if emitted == before or (not written and len(emitted) > _MOST_BLANKS):
            return _ended(options, written, {}), tuple(path)


def _after(written: str, token: str) -> str:
    return written + token if written else token.lstrip()


def _goes_on(text: str, written: str, options: dict[str, None]) -> bool:
    """Whether an option that is longer than `written` continues like `text`, or ends within it."""
    return not text or any(
        len(one) > len(written) and (one.startswith(text) or text.startswith(one)) for one in options
    )


def _ended(options: Sequence[str], written: str, tops: dict[str, float]) -> int:
    if written in options:
        return options.index(written)
    raise BackendError(
        "the model would write none of the options; most likely here: "
        f"{', '.join(map(repr, tops)) or 'nothing'}",
        hint="list the options in the prompt",
    )
