"""Speculation: which tokens a request's next row guesses, and figures about the results.

A plan's row carries guesses as its last tokens (`Row.drafts`), from prompt look-up (`requests/drafting.py`)
or a draft model (`RowResult.guesses`). The runner samples behind each right guess, with the draws and masks
that the position would have had anyway. So outputs are the same as without, sampled ones included (Leviathan
et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192, accept by a ratio of
probabilities instead; here a draw is a function of seed and step, and a guess is right if it is drawn).

The number of guesses follows recent success, and is zero if they are right less often than pays: the cost of
one more token is learned from the times of passes (`Pace`). At the commit (`batching.py`) the slots of wrong
guesses are taken back; the cache never gets one.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from runtime.cache.manager import CacheManager
from runtime.config.speculation import SpeculationConfig
from runtime.plan import Row, StepResult
from runtime.protocol.errors import RuntimeFault
from runtime.scheduler.requests.drafting import Drafting, PromptLookup
from runtime.scheduler.requests.images import KEYS
from runtime.scheduler.requests.request import Request

AHEAD = 16
"""Slots taken besides those that a row's guesses need, so that they lie in one piece."""
RETRY = 24
"""One in so many rows, over all requests, guesses even if that does not seem to pay: costs are learned from
trials."""
KEPT = 0.98  # weight of a pass relative to the next one
SPREAD = 0.5  # variance of token counts below which nothing is learned about `each`
OUTLIER = 4.0  # times the mean: a longer pass was delayed by something else


class Pace:
    """What one more token costs in a pass, learned from the times of passes.

    A pass of n tokens takes about base + each * n. If reading the weights takes most of the time, `each` is
    small against `base`, and guesses are nearly free; if many requests run, each token costs its share, and a
    guess must be right as often as that."""

    def __init__(self) -> None:
        self._weight = self._n = self._t = self._nn = self._nt = 0.0
        self._ratio = 0.0  # each / base

    def observe(self, tokens: int, seconds: float) -> None:
        """A pass that computed no prompts. 0 seconds: not measured."""
        if seconds <= 0:
            return
        if self._weight > 8 and seconds > OUTLIER * self._t / self._weight:
            return
        self._weight = KEPT * self._weight + 1
        self._n = KEPT * self._n + tokens
        self._t = KEPT * self._t + seconds
        self._nn = KEPT * self._nn + tokens * tokens
        self._nt = KEPT * self._nt + tokens * seconds
        mean_n, mean_t = self._n / self._weight, self._t / self._weight
        variance = self._nn / self._weight - mean_n * mean_n
        if self._weight > 4 and variance > SPREAD:
            each = max(0.0, (self._nt / self._weight - mean_n * mean_t) / variance)
            base = mean_t - each * mean_n
            self._ratio = each / base if base > 0.01 * mean_t else each / (0.01 * mean_t)

    def price(self, rows: int) -> float:
        """The time of one more token relative to a token's time in a pass of `rows` tokens: how often a guess
        must be right to gain anything. 0 as long as nothing is known."""
        cost = self._ratio * rows
        return cost / (1.0 + cost)


class Speculation:
    """`manager`: for the slots of guesses. Drafts use only free slots; nothing is evicted for them."""

    def __init__(self, config: SpeculationConfig, manager: CacheManager) -> None:
        self._config, self._manager = config, manager
        self._by_model = config.algorithm == "STANDALONE"
        self._totals = (0, 0, 0)  # Drafting.totals of the requests that have finished
        self._pace = Pace()
        self._price = 0.0
        self._passed = 0

    def begin(self, request: Request) -> None:
        """The request is new. One that returns hidden states gets no guesses."""
        if request.hidden == "none" and request.params.max_new_tokens > 1:
            lookup = None if self._by_model else PromptLookup(self._config.min_match, self._config.max_match)
            request.drafting = Drafting(self._config.drafts, lookup)

    def guesses(self, request: Request) -> tuple[int, ...]:
        """Tokens that may follow, as far as there are slots and its constraint accepts them (if its matcher
        has followed the last token, which may be deferred). None if the next token is determined."""
        drafting, guide = request.drafting, request.guide
        if drafting is None or request.healing is not None:
            return ()
        if guide is not None and guide.pending:
            return ()
        most = min(drafting.reach, request.to_come - 1)
        at_hand = drafting.guesses and drafting.at == len(request.tokens)  # from a draft model
        if drafting.hope < self._price:
            self._passed = (self._passed + 1) % RETRY
        drafting.weigh(self._price, retry=not self._passed)
        if most < 1 or not (drafting.tries or at_hand):
            return ()
        guesses = drafting.guess(request.tokens, most)
        if request.images is not None:  # an image is never sampled
            guesses = tuple(itertools.takewhile(lambda token: token < KEYS, guesses))
        if guesses and guide is not None and not guide.unread:
            guesses = _accepted(request, guesses)
        return guesses[: self._slots_for(request, len(guesses))] if guesses else ()

    def landed(self, rows: Sequence[Row], result: StepResult) -> None:
        """A pass has ended: learn the cost of a guess from it."""
        drafts = sum([row.drafts for row in rows])
        tokens = sum([len(row.tokens) for row in rows])
        if tokens - drafts == len(rows):
            self._pace.observe(tokens, result.seconds)
            self._price = self._pace.price(len(rows))

    def requested(self, request: Request) -> int:
        """How many guesses to request from a draft model behind the request's next row."""
        drafting = request.drafting
        if not self._by_model or drafting is None or not drafting.tries:
            return 0
        return max(0, min(drafting.reach, request.to_come - 2))

    def ended(self, request: Request) -> None:
        """It has finished."""
        if request.drafting is not None:
            steps, accepted, drafted = map(operator.add, self._totals, request.drafting.totals)
            self._totals = steps, accepted, drafted

    def state(self, live: Iterable[Request]) -> dict[str, Any]:
        """Figures since the start."""
        drafting = [request.drafting.totals for request in live if request.drafting is not None]
        steps, accepted, drafted = map(sum, zip(self._totals, *drafting))
        return {
            "spec_verify_steps_total": steps,
            "spec_accepted_tokens_total": accepted,
            "spec_drafted_tokens_total": drafted,
            "spec_accept_length": (accepted + steps) / steps if steps else 0.0,
            "spec_accept_rate": accepted / drafted if drafted else 0.0,
        }

    def _slots_for(self, request: Request, count: int) -> int:
        """For how many of `count` guesses the request has slots, or gets free ones."""
        lease, manager = request.lease, self._manager
        assert lease is not None
        need = len(request.tokens) + count - lease.capacity
        if need > 0:
            wish = min(need + AHEAD, request.most - lease.capacity)
            if manager.allocator.ceil(wish) <= manager.allocator.free:
                manager.grow(lease, need, wish)
        return max(0, min(count, lease.capacity - len(request.tokens)))


def _accepted(request: Request, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The first of `tokens`, as many as the request's constraint accepts."""
    assert request.guide is not None
    matcher = request.guide.matcher.copy()
    try:
        for count, token in enumerate(tokens):
            if matcher.is_terminated() or not matcher.advance(token):
                return tokens[:count]
    except RuntimeFault:
        return ()  # a guess is no reason to fail; the output will, if it comes this far
    return tokens
