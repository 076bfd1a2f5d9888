"""The sampler against plain numpy, and the laws its draws keep."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.sampling.forbidden import Forbidden
from runtime.engine.sampling.logprobs import NOT_FINITE, Logits
from runtime.engine.sampling.sampler import NOTHING_ALLOWED, Sampler, uniform
from runtime.plan import Row, Run, Sample, TokenMask
from runtime.protocol.sampling import SamplingParams

VOCAB = 70


_SEQS = itertools.count(1)


def row(output: tuple[int, ...] = (), prompt: tuple[int, ...] = (), **words: Any) -> Row:
    return Row(next(_SEQS), (0,), 0, (Run(0, 1),), SamplingParams(**words), output=output, prompt=prompt)


def sample(*args: Any) -> list[int | str]:
    return Sampler().sample(*args)


def expected(logits: np.ndarray, one: Row, allowed: list[int] | None = None) -> np.ndarray:
    """The distribution a row is drawn from, written as the words' definitions say."""
    p = one.sampling
    scores = logits.astype(np.float64).copy()
    for token in set(one.prompt) | set(one.output):
        scores[token] = (
            scores[token] / p.repetition_penalty
            if scores[token] > 0
            else scores[token] * p.repetition_penalty
        )
    for token in set(one.output):
        scores[token] -= one.output.count(token) * p.frequency_penalty + p.presence_penalty
    for token, bias in p.logit_bias.items():
        scores[token] += bias
    if allowed is not None:
        scores[[token for token in range(len(scores)) if token not in allowed]] = -math.inf
    if p.greedy:
        return np.eye(len(scores))[int(scores.argmax())]
    probs = np.exp((scores - scores.max()) / p.temperature)
    probs /= probs.sum()
    if p.top_k > 0:
        probs[probs < np.sort(probs)[-min(p.top_k, len(probs))]] = 0.0
        probs /= probs.sum()
    if p.top_p < 1.0:
        order = np.argsort(-probs, kind="stable")
        kept = order[: int((np.cumsum(probs[order]) - probs[order] < p.top_p).sum())]
        probs[[token for token in range(len(probs)) if token not in kept]] = 0.0
        probs /= probs.sum()
    probs[probs < p.min_p * probs.max()] = 0.0
    return probs / probs.sum()


def drawn(probs: np.ndarray, draw: float) -> int:
    return int(np.searchsorted(np.cumsum(probs), draw * probs.sum(), side="right"))


WORDS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([-1, 1, 2, 13, 69, 200]),
        "top_p": st.sampled_from([1.0, 0.99, 0.6, 0.05]),
        "min_p": st.sampled_from([0.0, 0.02, 0.4]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.7, -1.5]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.6, 0.7]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), max_size=3),
    }
)
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=8).map(tuple)
ROWS = st.lists(
    st.tuples(
        WORDS, IDS, IDS, st.one_of(st.none(), st.sets(st.integers(0, VOCAB - 1), min_size=1)), st.booleans()
    ),
    min_size=1,
    max_size=6,
)


def packed(ids: set[int] | list[int], vocab: int = VOCAB) -> np.ndarray:
    flags = np.zeros(-(-vocab // 32) * 32, dtype=np.uint8)
    flags[list(ids)] = 1
    return np.packbits(flags, bitorder="little").view(np.uint32)


@settings(max_examples=150, deadline=None)
@given(ROWS, st.integers(0, 2**32 - 1))
def test_equals_the_definition(made: Any, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(scale=2.0, size=(len(made), VOCAB)).astype(np.float32)
    rows = [row(output, prompt, **words) for words, output, prompt, _, _ in made]
    masks = {}
    for index, (_, _, _, allowed, listed) in enumerate(made):
        if allowed is not None:
            masks[index] = TokenMask(packed(allowed), np.array(sorted(allowed)) if listed else None)
    draws = [uniform(seed, step) for step in range(len(rows))]
    got = sample(torch.from_numpy(logits), rows, masks, draws)
    for index, (one, token) in enumerate(zip(rows, got)):
        probs = expected(logits[index], one, made[index][3] and sorted(made[index][3]))
        assert isinstance(token, int)
        if token != drawn(probs, draws[index]):
            # Allowed only where float32 and float64 disagree about a boundary.
            edge = np.cumsum(probs)[[token, drawn(probs, draws[index])]]
            assert np.abs(edge - draws[index]).min() < 1e-5
        assert probs[token] > 0


def test_frequencies_are_the_probabilities() -> None:
    probs = np.array([0.5, 0.25, 0.15, 0.06, 0.04])
    logits = torch.from_numpy(np.log(probs)).float().expand(2000, 5)
    rows = [row()] * 2000
    tokens = sample(logits, rows, {}, [uniform(42, step) for step in range(2000)])
    shares = np.bincount(np.array(tokens, dtype=int), minlength=5) / 2000
    assert np.abs(shares - probs).max() < 0.03


def test_uniform_is_flat_and_depends_on_both_words() -> None:
    values = np.array([uniform(seed, step) for seed in range(50) for step in range(100)])
    assert values.min() >= 0
    assert values.max() < 1
    assert len(set(values)) == 5000
    assert np.abs(np.histogram(values, 10, (0, 1))[0] / 5000 - 0.1).max() < 0.02
    assert uniform(2**63 - 1, 5) != uniform(5, 2**62)


@pytest.mark.parametrize("words", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_a_row_is_drawn_alike_in_every_batch(words: dict[str, Any]) -> None:
    logits = torch.randn(90, 3000, generator=torch.Generator().manual_seed(0))
    draws = [uniform(index, 3) for index in range(90)]
    alone = [sample(logits[i : i + 1], [row(**words)], {}, draws[i : i + 1])[0] for i in range(90)]
    assert sample(logits, [row(**words)] * 90, {}, draws) == alone
    mixed = [row(**words) if index % 2 else row(temperature=0.7, top_p=0.5, top_k=50) for index in range(90)]
    assert sample(logits, mixed, {}, draws)[1::2] == alone[1::2]


def test_flat_distributions_need_more_than_the_first_candidates() -> None:
    logits = torch.zeros(1, 4000) + torch.arange(4000) * 1e-4
    probs = expected(logits[0].numpy(), row(top_p=0.9))
    assert (probs > 0).sum() > 2000
    for step in range(20):
        (token,) = sample(logits, [row(top_p=0.9)], {}, [uniform(0, step)])
        assert token == pytest.approx(drawn(probs, uniform(0, step)), abs=1)


def test_ties_go_to_the_lowest_id_and_ids_beyond_the_logits_are_never_taken() -> None:
    logits = torch.zeros(3, 40)
    greedy = row(temperature=0.0)
    beyond = TokenMask(packed([7, 9, 41, 63], 64), np.array([7, 9, 41, 63]))
    assert sample(logits, [greedy] * 3, {1: beyond, 2: TokenMask(beyond.bits)}, [0.0] * 3) == [0, 7, 7]
    only_beyond = TokenMask(packed([41], 64), np.array([41]))
    assert sample(logits, [greedy] * 3, {1: only_beyond, 2: TokenMask(only_beyond.bits)}, [0.0] * 3) == [
        0,
        NOTHING_ALLOWED,
        NOTHING_ALLOWED,
    ]


def test_forbidden() -> None:
    forbidden = Forbidden()
    for vocab in (1, 31, 32, 33, 64, 100, 33):
        rows = [sorted({*range(shift, vocab, 7), vocab - 1}) for shift in range(vocab % 5 + 1)]
        found = forbidden.fill([packed(ids, vocab) for ids in rows], vocab, torch.device("cpu"))
        assert found.shape == (len(rows), vocab)
        assert [np.flatnonzero(~row.numpy()).tolist() for row in found] == rows
    (short,) = forbidden.fill([packed([0, 31], 32)], 50, torch.device("cpu"))
    assert np.flatnonzero(~short.numpy()).tolist() == [0, 31]


def test_a_draw_close_to_one_stays_inside() -> None:
    for width in (3, 1000):
        logits = torch.full((1, width), -5.0)
        logits[0, width // 2 :] = -math.inf
        mask = TokenMask(packed(list(range(width // 2)), width))
        (token,) = sample(torch.zeros(1, width), [row()], {0: mask}, [1.0 - 2.0**-53])
        assert token == width // 2 - 1


def test_rows_that_take_their_best_id_are_sampled_at_once() -> None:
    logits = torch.randn(5, VOCAB)
    logits[0, [7, 9]] = 9.0  # the first of both
    logits[1, 3], logits[2, 4], logits[3, :2] = math.nan, -math.inf, torch.tensor([math.inf, -math.inf])
    rows = [row(temperature=0.0), *(row(top_k=1) for _ in range(4))]
    found = Sampler().at_once(Logits(logits, logits, None), rows, {}, [0.5] * 5)
    assert found == [Sample(7), *[NOT_FINITE] * 3, Sample(int(logits[4].argmax()))]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([32, VOCAB, 96]),  # words of a mask may end before the logits do, or behind them
    allowed=st.lists(st.sets(st.integers(0, 31)) | st.sets(st.integers(0, 95)), min_size=1, max_size=5),
)
def test_so_are_those_under_masks(seed: int, size: int, allowed: list[set[int]]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (len(allowed), VOCAB), generator=generator).float()  # many are equal
    logits[logits == -2] = torch.finfo(torch.float32).min / VOCAB
    rows, draws = [row(temperature=0.0) for _ in allowed], [0.5] * len(allowed)
    masks = {
        place: TokenMask(packed({one for one in some if one < size}, size))
        for place, some in enumerate(allowed)
        if place != 1
    }
    one_by_one = Sampler().sample(logits, rows, masks, draws)
    found = Sampler().at_once(Logits(logits, logits, None), rows, masks, draws)
    assert found == [one if isinstance(one, str) else Sample(one) for one in one_by_one]


@pytest.mark.parametrize(
    "words",
    [
        {"temperature": 1.0},
        {"temperature": 0.0, "presence_penalty": 0.5},
        {"temperature": 0.0, "logit_bias": {3: 1.0}},
        {"temperature": 0.0, "custom_logit_processor": "any"},
    ],
)
def test_others_are_not(words: dict[str, Any]) -> None:
    logits, plain = torch.randn(2, VOCAB), row(temperature=0.0)
    draws, given = [0.5, 0.5], Logits(logits, logits, None)
    assert Sampler().at_once(given, [plain, row(**words)], {}, draws) is None
    assert Sampler().at_once(given._replace(total=logits.logsumexp(-1)), [plain, plain], {}, draws) is None
