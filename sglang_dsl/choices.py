"""How select picks: pure functions over log-probabilities. Knows no backend, no prompt, no tokens.

Three methods rank the options:

    token_length_normalized                 mean log-probability of an option's tokens
    greedy_token_selection                  token by token, keeping the options with the likeliest next token
    unconditional_likelihood_normalized     mean of (log-probability - the same without the prompt): options
    that are
                                            likely anyway gain nothing (Brown et al. 2020, arXiv:2005.14165,
                                            2.4)

A log-probability of exactly 0.0 is a certain token and counts like any other. Ties go to the lowest index.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_dsl.backends.base import ChoiceScore


@dataclass(frozen=True, slots=True)
class Decision:
    """`scores`: the method's figure for each option, higher is better. `probabilities`: their softmax at
    temperature 1, adding up to 1."""

    index: int
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChoiceMethod:
    """A way to pick. `scores` gives each option's figure; `pick` the index of the best option. `sampled`:
    whether drawing with a temperature makes sense for it."""

    name: str
    scores: Callable[[Sequence[ChoiceScore]], list[float]]
    pick: Callable[[Sequence[ChoiceScore]], int]
    unconditional: bool = False
    sampled: bool = True

    def decide(
        self, scored: Sequence[ChoiceScore], temperature: float = 0.0, seed: int | None = None
    ) -> Decision:
        """Pick one option. Raises ValueError for no options, or options without a scored token."""
        if not scored:
            raise ValueError("there are no options to choose from")
        for index, score in enumerate(scored):
            if not score.logprobs:
                raise ValueError(f"option {index} has no scored token")
        figures = self.scores(scored)
        if temperature > 0:
            index = draw(softmax(figures, temperature), random.Random(seed).random())
        else:
            index = self.pick(scored)
        return Decision(index, tuple(figures), tuple(softmax(figures, 1.0)))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def best(figures: Sequence[float]) -> int:
    """Index of the highest figure, the lowest such index."""
    return max(range(len(figures)), key=lambda index: (figures[index], -index))


def softmax(figures: Sequence[float], temperature: float) -> list[float]:
    """Probabilities proportional to exp(figure / temperature); uniform over the best where all are -inf."""
    top = max(figures)
    if math.isinf(top):
        ties = [figure == top for figure in figures]
        return [tie / sum(ties) for tie in ties]
    weights = [math.exp((figure - top) / temperature) for figure in figures]
    return [weight / sum(weights) for weight in weights]


def draw(probabilities: Sequence[float], at: float) -> int:
    """The option whose share of [0, 1) holds `at`."""
    total = 0.0
    for index, probability in enumerate(probabilities):
        total += probability
        if at < total:
            return index
    # Rounding left a sliver at the end: it belongs to the last option that has any share.
    return max(index for index, probability in enumerate(probabilities) if probability > 0)


def length_normalized(scored: Sequence[ChoiceScore]) -> list[float]:
    return [mean(score.logprobs) for score in scored]


def pick_greedily(scored: Sequence[ChoiceScore]) -> int:
    """Column by column, keep the options with the highest figure until one is left. An option that has ended
    goes on with its own mean, so that it is neither favoured nor dropped for being short."""
    alive = list(range(len(scored)))
    for column in range(max(len(score.logprobs) for score in scored)):
        figures = [
            score.logprobs[column] if column < len(score.logprobs) else mean(score.logprobs)
            for score in (scored[index] for index in alive)
        ]
        top = max(figures)
        alive = [index for index, figure in zip(alive, figures, strict=True) if figure == top]
        if len(alive) == 1:
            break
    return alive[0]


def prior_normalized(scored: Sequence[ChoiceScore]) -> list[float]:
    """Raises ValueError where an option was not scored without the prompt."""
    figures: list[float] = []
    for index, score in enumerate(scored):
        if score.unconditional is None or len(score.unconditional) != len(score.logprobs):
            raise ValueError(f"option {index} was not scored without its prompt")
        # The first token of a text without any prompt has no probability in most models: None, counted as 0.
        prior = [0.0 if value is None else value for value in score.unconditional]
        figures.append(mean([gain(a, b) for a, b in zip(score.logprobs, prior, strict=True)]))
    return figures


def gain(logprob: float, prior: float) -> float:
    """How much likelier the prompt made a token. An impossible token stays impossible, whatever its prior."""
    return logprob if math.isinf(logprob) else logprob - prior


token_length_normalized = ChoiceMethod(
    "token_length_normalized", length_normalized, lambda scored: best(length_normalized(scored))
)
greedy_token_selection = ChoiceMethod(
    "greedy_token_selection", length_normalized, pick_greedily, sampled=False
)
unconditional_likelihood_normalized = ChoiceMethod(
    "unconditional_likelihood_normalized",
    prior_normalized,
    lambda scored: best(prior_normalized(scored)),
    unconditional=True,
)

METHODS: dict[str, ChoiceMethod] = {
    method.name: method
    for method in (token_length_normalized, greedy_token_selection, unconditional_likelihood_normalized)
}
