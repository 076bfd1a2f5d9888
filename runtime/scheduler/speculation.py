"""Speculation: which tokens a request's next row guesses, and the account of how that went.

A plan's row carries guesses as its last tokens (`Row.drafts`); the model computes them together with the
certain token, and the runner samples behind each guess that was right, with the draws and masks that the
place would have had anyway. So outputs are what they would be without, sampled ones included (Leviathan et
al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192, accept by a ratio of
probabilities instead; here a draw is a function of seed and place, and a guess is right if it is drawn).

- Who guesses: prompt look-up (`requests/lookup.py`), or a draft model, whose guesses come with the
  results of the step before (`RowResult.guesses`, `runtime/engine/drafting.py`).
- How many: as many as did well lately (`requests/drafting.py`), and none where they were right less often
  than pays: what a token more costs is learnt from what passes took (`requests/pace.py`). Guesses that the
  grammar refuses are cut off.
- What becomes of them (`scheduler/commit.py`): the row's slots are taken back up to the last certain token,
  and given to the tokens that were right one by one, as if each had had a step of its own. All that looks at
  a token (stops, grammars, forced text, log-probabilities) sees what it would see otherwise, and the cache
  is never given a wrong guess.
"""

from __future__ import annotations

import itertools
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
"""Of so many rows whose guesses do not seem to pay, of all requests, one guesses all the same: the price is
learnt from what is tried."""
KEPT = 0.98  # of what was seen, from pass to pass
SPREAD = 0.5  # variance of token counts below which nothing is learnt about `each`
OUTLIER = 4.0  # a pass that took so many times what was expected was held up by something else


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
        """Which share of a token's own time in a pass of `rows` tokens one more takes: how often a guess must
        be right to gain anything. 0 as long as nothing is known."""
        cost = self._ratio * rows
        return cost / (1.0 + cost)


class Speculation:
    """`manager`: for the slots of guesses, as far as some are free: nobody gives way to a guess.
    `active`: whether anything is guessed."""

    def __init__(self, config: SpeculationConfig, manager: CacheManager) -> None:
        self._config, self._manager = config, manager
        self.active = config.algorithm is not None
        self._by_model = config.algorithm == "STANDALONE"
        self._steps = self._accepted = self._drafted = 0
        self._pace = Pace()
        self._price = 0.0
        self._passed = 0

    def begin(self, request: Request) -> None:
        """The request is new. One that shows its hidden states is left alone."""
        if self.active and request.hidden == "none" and request.params.max_new_tokens > 1:
            lookup = None if self._by_model else PromptLookup(self._config.min_match, self._config.max_match)
            request.drafting = Drafting(self._config.drafts, lookup)

    def guesses(self, request: Request) -> tuple[int, ...]:
        """What may follow its tokens, as far as there are slots, and its constraint takes it: where that has
        followed the last token, which may be put off. Nothing where the next token is certain."""
        drafting, guide = request.drafting, request.guide
        if drafting is None or request.heal is not None:
            return ()
        if guide is not None and guide.pending:
            return ()
        most = min(drafting.reach, request.to_come - 1)
        at_hand = drafting.guesses and drafting.at == len(request.tokens)  # a draft model has made them
        if drafting.hope < self._price:
            self._passed = (self._passed + 1) % RETRY
        drafting.weigh(self._price, retry=not self._passed)
        if most < 1 or not (drafting.tries or at_hand):
            return ()
        found = drafting.guess(request.tokens, most)
        if request.images is not None:  # a picture is never sampled
            found = tuple(itertools.takewhile(lambda token: token < KEYS, found))
        if found and guide is not None and not guide.unread:
            found = _followed(request, found)
        return found[: self._room(request, len(found))] if found else ()

    def landed(self, rows: Sequence[Row], result: StepResult) -> None:
        """A pass has ended: what it tells of the price of a guess."""
        if not self.active:
            return
        drafts = sum([row.drafts for row in rows])
        tokens = sum([len(row.tokens) for row in rows])
        if tokens - drafts == len(rows):
            self._pace.observe(tokens, result.seconds)
            self._price = self._pace.price(len(rows))

    def wanted(self, request: Request) -> int:
        """How many guesses a draft model should make behind the request's next row."""
        drafting = request.drafting
        if not self._by_model or drafting is None or not drafting.tries:
            return 0
        return max(0, min(drafting.reach, request.to_come - 2))

    def ended(self, request: Request) -> None:
        """It is over."""
        if request.drafting is not None:
            steps, accepted, drafted = request.drafting.totals
            self._steps, self._accepted = self._steps + steps, self._accepted + accepted
            self._drafted += drafted

    def state(self, live: Iterable[Request]) -> dict[str, Any]:
        """Figures since the start; none where nothing is guessed."""
        if not self.active:
            return {}
        steps, accepted, drafted = self._steps, self._accepted, self._drafted
        for request in live:
            if request.drafting is not None:
                more = request.drafting.totals
                steps, accepted, drafted = steps + more[0], accepted + more[1], drafted + more[2]
        return {
            "spec_verify_steps_total": steps,
            "spec_accepted_tokens_total": accepted,
            "spec_drafted_tokens_total": drafted,
            "spec_accept_length": (accepted + steps) / steps if steps else 0.0,
            "spec_accept_rate": accepted / drafted if drafted else 0.0,
        }

    def _room(self, request: Request, wanted: int) -> int:
        """For how many guesses there are slots, those included that nobody uses."""
        lease, manager = request.lease, self._manager
        assert lease is not None
        need = len(request.tokens) + wanted - lease.capacity
        if need > 0:
            wish = min(need + AHEAD, request.most - lease.capacity)
            if manager.allocator.ceil(wish) <= manager.allocator.free:
                manager.grow(lease, need, wish)
        return max(0, min(wanted, lease.capacity - len(request.tokens)))


def _followed(request: Request, tokens: tuple[int, ...]) -> tuple[int, ...]:
    """The first of `tokens` that the request's constraint takes."""
    assert request.guide is not None
    matcher = request.guide.matcher.copy()
    try:
        for count, token in enumerate(tokens):
            if matcher.is_terminated() or not matcher.advance(token):
                return tokens[:count]
    except RuntimeFault:
        return ()  # a guess is no reason to fail: if the output comes to this place, it will
    return tokens
