"""How select picks: pure functions over log-probabilities. Knows no backend, no prompt, no tokens.

Four methods rank the options:

    token_length_normalized                 mean log-probability of an option's tokens
    greedy_token_selection                  token by token, keeping the options with the likeliest next token
    unconditional_likelihood_normalized     mean of (log-probability - the same without the prompt): options
    that are
                                            likely anyway gain nothing (Brown et al. 2020, arXiv:2005.14165,
                                            2.4)

    exact_string_likelihood                 log-probability that the model writes this option and none of
                                            those that go on from it: the sum over its tokens, less what the
                                            longer options that begin with it take

A log-probability of exactly 0.0 is a certain token and counts like any other. Ties go to the lowest index.

A program may bring a method of its own: a ChoicesSamplingMethod, or any callable that takes the same keyword
arguments. The four above can be called so, too.
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
    """`scores`: the method's figure for each option, higher is better. `probabilities`: their softmax at
    temperature 1, adding up to 1. `meta`: what a method of one's own says besides."""

    index: int
    scores: tuple[float, ...]
    probabilities: tuple[float, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)


Triples = Sequence[Sequence[Any]]
"""(log-probability, token id, text or None) of each token of one option."""


@dataclass(frozen=True, slots=True)
class ChoicesDecision:
    """The option taken, and what it was taken by: what a method gives that is called."""

    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


class ChoicesSamplingMethod(ABC):
    """Base of one's own methods: select(choices_method=MyMethod()). It is called where all programs wait, so
    it should compute and not wait itself."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether the options are to be scored without the prompt, too."""
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
        """Take one of `choices`. normalized_prompt_logprobs: the mean log-probability of each option's
        tokens. input_token_logprobs, unconditional_token_logprobs: of each option its tokens, behind the
        prompt and without it. output_token_logprobs: of each option those generated behind it; none are."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a select decided: s.choice(name).

    logprobs       per option the log-probabilities of its tokens after what all options share; -inf where the
                   backend does not score (see `measured`)
    scores         per option the method's figure, higher is better
    probabilities  softmax of the scores, adding up to 1
    measured       False where the backend only says which option it took; probabilities are 0 and 1 then
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
        """Of the option taken."""
        return self.probabilities[self.index]

    @property
    def margin(self) -> float:
        """How much likelier the option taken is than the likeliest other; below 0 where another is likelier,
        which drawing with a temperature can give. 1.0 for a single option."""
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
        """From a select's meta. Raises KeyError for another node's."""
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
        _check(scored)
        figures = self.scores(scored)
        if temperature > 0:
            index = draw(softmax(figures, temperature), random.Random(seed).random())
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
        """Take one of `choices` by the log-probabilities of their tokens. Means that are given count for what
        they say. Raises ValueError where there is not one entry for each option, or a token has none."""
        for given in (normalized_prompt_logprobs, input_token_logprobs, unconditional_token_logprobs):
            if given is not None and len(given) != len(choices):
                raise ValueError(f"{len(given)} entries for {len(choices)} options; give one for each")
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
class OwnMethod(ChoiceMethod):
    """A method that a program brought, among the others. Its figures are the means, whatever it goes by."""

    method: Callable[..., ChoicesDecision] | None = None

    def decide(
        self, scored: Sequence[ChoiceScore], temperature: float = 0.0, seed: int | None = None
    ) -> Decision:
        """Ask it. Raises ValueError for no options or unscored ones, BadProgram where it fails or takes none
        of them."""
        assert self.method is not None
        _check(scored)
        figures = length_normalized(scored)
        choices = [score.text for score in scored]
        without = [_triples(score.unconditional or (), score) for score in scored]
        try:
            made = self.method(
                choices=list(choices),
                normalized_prompt_logprobs=list(figures),
                input_token_logprobs=[_triples(score.logprobs, score) for score in scored],
                output_token_logprobs=[[] for _ in scored],
                unconditional_token_logprobs=without if self.unconditional else None,
            )
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            raise BadProgram(f"the choices_method {self.name} failed: {words:.200}") from error
        taken = getattr(made, "decision", None)
        if taken not in choices:
            raise BadProgram(
                f"the choices_method {self.name} took {taken!r:.80}, which is none of the options"
            )
        meta = dict(getattr(made, "meta_info", None) or {})
        return Decision(choices.index(taken), tuple(figures), tuple(softmax(figures, 1.0)), meta)


def as_method(given: object) -> ChoiceMethod:
    """The method that a program named or brought. Raises ValueError for what is none."""
    if isinstance(given, ChoiceMethod):
        return given
    if given is None:
        return token_length_normalized
    if isinstance(given, str):
        if given not in METHODS:
            raise ValueError(f"unknown choices_method {given!r}; known: {', '.join(METHODS)}")
        return METHODS[given]
    if isinstance(given, type) or not callable(given):
        raise ValueError(
            f"choices_method takes a method, its name or a callable, got {given!r:.80}; known: "
            f"{', '.join(METHODS)}"
        )
    name = getattr(given, "__name__", type(given).__name__)
    wanted = bool(getattr(given, "requires_unconditional_logprobs", False))
    return OwnMethod(name, length_normalized, _best_mean, wanted, sampled=False, method=given)


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
    """What a select's meta says of its options: Choice.of() reads it back, and programs written for sglang
    find what they look for (input_token_logprobs and the like: [log-probability, id, text] of each token; ids
    and texts are None where the backend does not say them)."""
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


def _best_mean(scored: Sequence[ChoiceScore]) -> int:
    return best(length_normalized(scored))


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


def exact_strings(scored: Sequence[ChoiceScore]) -> list[float]:
    """Where an option begins another, the other's probability is part of its own and is taken off. Without
    texts (a backend's scores by themselves) nothing is."""
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
greedy_token_selection = ChoiceMethod(
    "greedy_token_selection", length_normalized, pick_greedily, sampled=False
)
unconditional_likelihood_normalized = ChoiceMethod(
    "unconditional_likelihood_normalized",
    prior_normalized,
    lambda scored: best(prior_normalized(scored)),
    unconditional=True,
)

exact_string_likelihood = ChoiceMethod(
    "exact_string_likelihood", exact_strings, lambda scored: best(exact_strings(scored))
)

METHODS: dict[str, ChoiceMethod] = {
    method.name: method
    for method in (
        token_length_normalized,
        greedy_token_selection,
        unconditional_likelihood_normalized,
        exact_string_likelihood,
    )
}
