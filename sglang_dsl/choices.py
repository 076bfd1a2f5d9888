"""How select picks an option: pure functions over log-probabilities. Knows no backend, no prompt, no tokens.

Four methods rank the options:

token_length_normalized              mean log-probability of an option's tokens
greedy_token_selection               token by token, keeping the options with the most likely next token
unconditional_likelihood_normalized  mean of (log-probability - the same without the prompt), so that options
                                     which are likely anyway gain nothing (Brown et al. 2020,
                                     arXiv:2005.14165, 2.4)
exact_string_likelihood              log-probability that the model writes exactly this option: the sum over
                                     its tokens, without the share of longer options that start with it

A log-probability of exactly 0.0 is a certain token and counts like any other. If options tie, the one with
the lowest index wins.

A program may pass a method of its own: a ChoicesSamplingMethod, or any callable with the same keyword
arguments. The four methods above can be called the same way.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_dsl.conversation.requests import ChoiceScore
from sglang_dsl.errors import BadProgram

if TYPE_CHECKING:
    from sglang_dsl.views.notebook import Page


@dataclass(frozen=True, slots=True)
class Decision:
    """`scores`: the method's score for each option, higher is better. `probabilities`: their softmax at
    temperature 1, adding up to 1. `meta`: additional metadata of a custom method."""

    index: int
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)


Triples = Sequence[Sequence[Any]]
"""(log-probability, token id, text or None) of each token of one option."""


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """The result of a choices method: the option taken, and its metadata."""

    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


class ChoicesSamplingMethod(ABC):
    """Base class for your own methods: select(choices_method=MyMethod()). It is called on a thread that all
    programs share, so it should compute and never wait."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether the options should also be scored without the prompt."""
        return False

    @abstractmethod
    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[Triples],
        output_token_logprobs: list[Triples],
        unconditional_token_logprobs: list[Triples] | None = None,
    ) -> ChoicesDecision:
        """Pick one of `choices`.

        normalized_prompt_logprobs    the mean log-probability of each option's tokens
        input_token_logprobs          the tokens of each option, after the prompt
        unconditional_token_logprobs  the tokens of each option, without the prompt
        output_token_logprobs         the tokens generated after each option; always empty
        """


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of a select, returned by s.choice(name).

    text, index    the option taken, and its position among the options
    options        all options
    logprobs       for each option, the log-probabilities of its tokens after what all options share; -inf if
                   the backend does not score (see `measured`)
    scores         for each option, the method's score; higher is better
    probabilities  softmax of the scores, adding up to 1
    method         the name of the method
    measured       False if the backend only reports which option it took; probabilities are then 0 and 1
    """

    text: str
    index: int
    options: tuple[str, ...]
    logprobs: tuple[tuple[float, ...], ...]
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]
    method: str
    measured: bool = True

    @property
    def probability(self) -> float:
        """The probability of the option taken."""
        return self.probabilities[self.index]

    @property
    def margin(self) -> float:
        """The probability of the option taken, minus that of the most likely other option. Negative if
        another one is more likely, which can happen when a temperature is used. 1.0 for a single option."""
        others = [p for index, p in enumerate(self.probabilities) if index != self.index]
        return self.probability - max(others, default=0.0)

    def _page(self) -> Page:
        from sglang_dsl.views import listing, notebook  # for notebooks alone

        return notebook.Page(
            listing.choice(
                self.options, self.index, self.probabilities, self.scores, self.method, self.measured
            ),
            listing.choice_graph(self.options, self.index, self.probabilities),
        )

    def _repr_html_(self) -> str:
        return self._page().html

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return self._page().bundle()

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> Choice:
        """From a select's metadata. Raises KeyError for that of another node."""
        options, index = tuple(meta["choices"]), int(meta["index"])
        return cls(
            options[index],
            index,
            options,
            tuple(map(tuple, meta["logprobs"])),
            tuple(meta["scores"]),
            tuple(meta["probabilities"]),
            str(meta["method"]),
            meta.get("exact", True) is not False,
        )


@dataclass(frozen=True, slots=True)
class ChoiceMethod(ChoicesSamplingMethod):
    """A method of select. `scores` returns the score of each option, `pick` the index of the best one.
    `sampled`: whether it can be used with a temperature."""

    name: str
    scores: Callable[[Sequence[ChoiceScore]], list[float]]
    pick: Callable[[Sequence[ChoiceScore]], int]
    unconditional: bool = False
    sampled: bool = True

    def decide(
        self, scored: Sequence[ChoiceScore], temperature: float = 0.0, seed: int | None = None
    ) -> Decision:
        """Pick one option. Raises ValueError if there are no options, or if an option has no scored token."""
        _check(scored)
        figures = self.scores(scored)
        if temperature > 0:
            index = draw(softmax(figures, temperature), seed)
        else:
            index = self.pick(scored)
        return Decision(index, tuple(figures), tuple(softmax(figures, 1.0)))

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return self.unconditional

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float] | None = None,
        input_token_logprobs: Sequence[Triples],
        output_token_logprobs: Sequence[Triples] | None = None,
        unconditional_token_logprobs: Sequence[Triples] | None = None,
    ) -> ChoicesDecision:
        """Pick one of `choices` by the log-probabilities of their tokens. If means are given, they are used
        as they are. Raises ValueError unless there is one entry for each option and every token has a
        log-probability."""
        for entries in (normalized_prompt_logprobs, input_token_logprobs, unconditional_token_logprobs):
            if entries is not None and len(entries) != len(choices):
                raise ValueError(f"{len(entries)} entries for {len(choices)} options; pass one for each")
        without = unconditional_token_logprobs
        scored = [
            ChoiceScore(
                tuple(_figure(triple, index) for triple in tokens),
                tuple(triple[1] for triple in tokens),
                None if without is None else tuple(triple[0] for triple in without[index]),
                choice,
            )
            for index, (choice, tokens) in enumerate(zip(choices, input_token_logprobs, strict=True))
        ]
        decision = self.decide(scored)
        if normalized_prompt_logprobs is not None and self is token_length_normalized:
            means = tuple(normalized_prompt_logprobs)
            decision = Decision(best(means), means, tuple(softmax(means, 1.0)))
        return ChoicesDecision(choices[decision.index], report(self, scored, decision))


@dataclass(frozen=True, slots=True)
class UserMethod(ChoiceMethod):
    """A method passed by a program. Its reported scores are the means, whatever it decides by."""

    method: Callable[..., ChoicesDecision] | None = None

    def decide(
        self, scored: Sequence[ChoiceScore], temperature: float = 0.0, seed: int | None = None
    ) -> Decision:
        """Call it. Raises ValueError if there are no options or unscored ones, BadProgram if the method fails
        or returns none of them."""
        assert self.method is not None
        _check(scored)
        figures = length_normalized(scored)
        choices = [score.text for score in scored]
        without = [_triples(score.unconditional or (), score) for score in scored]
        try:
            result = self.method(
                choices=list(choices),
                normalized_prompt_logprobs=list(figures),
                input_token_logprobs=[_triples(score.logprobs, score) for score in scored],
                output_token_logprobs=[[] for _ in scored],
                unconditional_token_logprobs=without if self.unconditional else None,
            )
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise BadProgram(f"the choices_method {self.name} failed: {reason:.200}") from error
        choice = getattr(result, "decision", None)
        if choice not in choices:
            raise BadProgram(
                f"the choices_method {self.name} returned {choice!r:.80}, which is not one of the options"
            )
        meta = dict(getattr(result, "meta_info", None) or {})
        return Decision(choices.index(choice), tuple(figures), tuple(softmax(figures, 1.0)), meta)


def as_method(method: object) -> ChoiceMethod:
    """The method that a program named or passed. Raises ValueError for anything else."""
    if isinstance(method, ChoiceMethod):
        return method
    if method is None:
        return token_length_normalized
    if isinstance(method, str):
        if method not in METHODS:
            raise ValueError(f"unknown choices_method {method!r}; known: {', '.join(METHODS)}")
        return METHODS[method]
    if isinstance(method, type) or not callable(method):
        raise ValueError(
            f"choices_method takes a method, its name or a callable, got {method!r:.80}; known: "
            f"{', '.join(METHODS)}"
        )
    name = getattr(method, "__name__", type(method).__name__)
    unconditional = bool(getattr(method, "requires_unconditional_logprobs", False))
    return UserMethod(name, length_normalized, _best_mean, unconditional, sampled=False, method=method)


def _check(scored: Sequence[ChoiceScore]) -> None:
    if not scored:
        raise ValueError("there are no options to choose from")
    for index, score in enumerate(scored):
        if not score.logprobs:
            raise ValueError(f"option {index} has no scored token")


def _figure(triple: Sequence[Any], index: int) -> float:
    if triple[0] is None:
        raise ValueError(f"a token of option {index} has no log-probability")
    return float(triple[0])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def report(method: ChoiceMethod, scored: Sequence[ChoiceScore], decision: Decision) -> dict[str, Any]:
    """The options' part of a select's metadata. Choice.of() reads it back, and programs written for sglang
    find the fields they expect (input_token_logprobs and similar: [log-probability, id, text] of each token;
    ids and texts are None if the backend does not report them)."""
    tokens = [_triples(score.logprobs, score) for score in scored]
    meta: dict[str, Any] = {
        "index": decision.index,
        "choices": [score.text for score in scored],
        "method": method.name,
        "scores": list(decision.scores),
        "probabilities": list(decision.probabilities),
        "logprobs": [list(score.logprobs) for score in scored],
        "normalized_prompt_logprobs": [mean(score.logprobs) for score in scored if score.logprobs],
        "input_token_logprobs": tokens,
        "output_token_logprobs": [[] for _ in scored],
    }
    if method is greedy_token_selection:
        length = max(len(score.logprobs) for score in scored)
        meta["greedy_logprob_matrix"] = [
            [*score.logprobs, *[mean(score.logprobs)] * (length - len(score.logprobs))] for score in scored
        ]
    if method.unconditional:
        meta["unconditional_logprobs"] = [list(score.unconditional or ()) for score in scored]
        meta["unconditional_token_logprobs"] = [
            _triples(score.unconditional or (), score) for score in scored
        ]
        meta["normalized_unconditional_prompt_logprobs"] = list(decision.scores)
    return meta


def _triples(logprobs: Sequence[float | None], score: ChoiceScore) -> list[list[Any]]:
    nothing = [None] * len(logprobs)
    ids = score.token_ids if len(score.token_ids) == len(logprobs) else nothing
    texts = score.token_texts if len(score.token_texts) == len(logprobs) else nothing
    return [list(triple) for triple in zip(logprobs, ids, texts, strict=True)]


def best(figures: Sequence[float]) -> int:
    """Index of the highest figure; the lowest such index."""
    return max(range(len(figures)), key=lambda index: (figures[index], -index))


def softmax(figures: Sequence[float], temperature: float) -> list[float]:
    """Probabilities proportional to exp(figure / temperature); uniform over the best where all are -inf."""
    top = max(figures)
    if math.isinf(top):
        ties = [figure == top for figure in figures]
        return [tie / sum(ties) for tie in ties]
    weights = [math.exp((figure - top) / temperature) for figure in figures]
    return [weight / sum(weights) for weight in weights]


def draw(probabilities: Sequence[float], seed: int | None) -> int:
    """The option with the greatest log-probability + Gumbel noise, which has this distribution: rounding of
    the probabilities changes a draw only where two options are as close as that."""
    dice = random.Random(seed)
    noise = [-math.log(max(dice.expovariate(1.0), 1e-300)) for _ in probabilities]
    return best([math.log(p) + more if p > 0 else -math.inf for p, more in zip(probabilities, noise)])


def length_normalized(scored: Sequence[ChoiceScore]) -> list[float]:
    return [mean(score.logprobs) for score in scored]


def _best_mean(scored: Sequence[ChoiceScore]) -> int:
    return best(length_normalized(scored))


def pick_greedily(scored: Sequence[ChoiceScore]) -> int:
    """Column by column, keep the options with the highest figure until one is left. An option that has ended
    continues with its own mean, so that being short is neither an advantage nor a disadvantage."""
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
    """Raises ValueError if an option was not scored without the prompt."""
    figures: list[float] = []
    for index, score in enumerate(scored):
        if score.unconditional is None or len(score.unconditional) != len(score.logprobs):
            raise ValueError(f"option {index} was not scored without its prompt")
        # The first token of a text without any prompt has no probability in most models: None, counted as 0.
        prior = [0.0 if value is None else value for value in score.unconditional]
        figures.append(mean([gain(a, b) for a, b in zip(score.logprobs, prior, strict=True)]))
    return figures


def gain(logprob: float, prior: float) -> float:
    """How much more likely the prompt made a token. An impossible token stays impossible, whatever its
    prior."""
    return logprob if math.isinf(logprob) else logprob - prior


def exact_strings(scored: Sequence[ChoiceScore]) -> list[float]:
    """If an option is a prefix of another, its probability includes the other's, which is subtracted. Without
    texts (a backend's scores alone) nothing is subtracted."""
    sums = [sum(score.logprobs) for score in scored]
    figures: list[float] = []
    for index, score in enumerate(scored):
        longer = [at for at, other in enumerate(scored) if at != index and _begins(score.text, other.text)]
        # Only those right behind it: the ones that go on from these are part of them.
        nearest = [at for at in longer if not any(_begins(scored[by].text, scored[at].text) for by in longer)]
        figures.append(_less(sums[index], [sums[at] for at in nearest]))
    return figures


def _begins(short: str, long: str) -> bool:
    return bool(short) and len(short) < len(long) and long.startswith(short)


def _less(whole: float, parts: Sequence[float]) -> float:
    """log(exp(whole) - sum of exp(part)); rounding, and other ways to cut the longer text into tokens, can
    make the parts more than the whole: then next to nothing is left of it."""
    rest = -math.expm1(math.log(taken)) if (taken := sum(math.exp(part - whole) for part in parts)) else 1.0
    return whole + math.log(max(rest, 1e-12)) if math.isfinite(whole) else whole


token_length_normalized = ChoiceMethod("token_length_normalized", length_normalized, _best_mean)
"""Compares the mean log-probability of the options' tokens. The default."""
greedy_token_selection = ChoiceMethod(
    "greedy_token_selection", length_normalized, pick_greedily, sampled=False
)
"""Goes token by token and keeps the options with the most likely next token. Takes no temperature."""
unconditional_likelihood_normalized = ChoiceMethod(
    "unconditional_likelihood_normalized",
    prior_normalized,
    lambda scored: best(prior_normalized(scored)),
    unconditional=True,
)
"""Compares how much more likely the prompt makes the options: the mean of (log-probability - the same without
the prompt)."""

exact_string_likelihood = ChoiceMethod(
    "exact_string_likelihood", exact_strings, lambda scored: best(exact_strings(scored))
)
"""Compares the probabilities that the model writes exactly this option."""

METHODS: dict[str, ChoiceMethod] = {
    method.name: method
    for method in (
        token_length_normalized,
        greedy_token_selection,
        unconditional_likelihood_normalized,
        exact_string_likelihood,
    )
}
