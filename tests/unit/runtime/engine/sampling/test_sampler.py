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

from runtime.engine.sampling.logprobs import NOT_FINITE, Logits
from runtime.engine.sampling.sampler import NOTHING_ALLOWED, Forbidden, Sampler, key_of
from runtime.kernels.gumbel import FACTORS, ID_FACTOR
from runtime.plan import Row, Run, Sample, TokenMask
from runtime.protocol.sampling import SamplingParams
from tests.exploring import tries

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


def noise(key: int, token: int) -> float:
    """As runtime.kernels.gumbel says, in whole numbers and float64."""
    lower, upper, all_bits = key & 0xFFFFFFFF, key >> 32, 0xFFFFFFFF
    x = (token * ID_FACTOR + lower) & all_bits
    for turn, (shift, factor) in enumerate(FACTORS):
        x = (x + upper * (turn == 2)) & all_bits
        x = (x ^ x >> shift) * factor & all_bits
    return -math.log(-math.log1p(-((x ^ x >> 15) // 2 + 0.5) / 2**31))


def drawn(probs: np.ndarray, key: int) -> tuple[int, list[float]]:
    """The token, and what each comes to."""
    values = [math.log(p) + noise(key, token) if p else -math.inf for token, p in enumerate(probs)]
    return int(np.argmax(values)), values


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


@settings(max_examples=tries(150), deadline=None)
@given(ROWS, st.integers(0, 2**32 - 1))
def test_equals_the_definition(made: Any, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(scale=2.0, size=(len(made), VOCAB)).astype(np.float32)
    rows = [row(output, prompt, **words) for words, output, prompt, _, _ in made]
    masks = {}
    for index, (_, _, _, allowed, listed) in enumerate(made):
        if allowed is not None:
            masks[index] = TokenMask(packed(allowed), np.array(sorted(allowed)) if listed else None)
    keys = [key_of(seed, step) for step in range(len(rows))]
    got = sample(torch.from_numpy(logits), rows, masks, keys)
    for index, (one, token) in enumerate(zip(rows, got)):
        probs = expected(logits[index], one, made[index][3] and sorted(made[index][3]))
        assert isinstance(token, int)
        if not one.sampling.greedy:
            best, values = drawn(probs, keys[index])
            # Another one only where float32 and float64 disagree.
            assert values[token] == values[best] or values[best] - values[token] < 1e-5
        assert probs[token] > 0


@pytest.mark.parametrize(
    ("words", "kept"), [({}, 40), ({"temperature": 0.6}, 40), ({"top_k": 6}, 6), ({"top_p": 0.8}, 16)]
)
def test_frequencies_are_the_probabilities(words: dict[str, Any], kept: int) -> None:
    """By the chi-square statistic: of `kept` - 1 degrees of freedom, whose mean that is."""
    count, logits = 6_000, torch.linspace(2.0, -2.0, 40)
    probs = expected(logits.numpy(), row(**words))
    assert (probs > 0).sum() == kept
    tokens = sample(
        logits.expand(count, 40), [row(**words)] * count, {}, [key_of(42, i) for i in range(count)]
    )
    found = np.bincount(np.array(tokens, dtype=int), minlength=40)
    assert not found[probs == 0].any()
    wanted = probs[probs > 0] * count
    statistic = float(((found[probs > 0] - wanted) ** 2 / wanted).sum())
    spread = math.sqrt(2 * (kept - 1))
    assert abs(statistic - (kept - 1)) < 4 * spread


def test_a_key_depends_on_both_words() -> None:
    keys = {key_of(seed, step) for seed in range(50) for step in range(100)}
    assert len(keys) == 5000
    assert max(keys) < 1 << 64
    assert key_of(2**63 - 1, 5) != key_of(5, 2**63 - 1)


@pytest.mark.parametrize("words", [{}, {"top_k": 40}, {"top_p": 0.9}])
def test_rounding_of_others_moves_no_draw(words: dict[str, Any]) -> None:
    """What a batch does to logits changes draws where two are as close as that, and no more: a border of a
    cumulative sum moves with the whole vocabulary."""
    dice = torch.Generator().manual_seed(3)
    logits = 2.5 * torch.randn(300, 49_152, generator=dice)
    other = logits + 4e-6 * torch.randn(logits.shape, generator=dice)
    rows, keys = [row(temperature=1.3, **words)] * 300, [key_of(7, step) for step in range(300)]
    assert sample(logits, rows, {}, keys) == sample(other, rows, {}, keys)


@pytest.mark.parametrize("words", [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}])
def test_a_row_is_drawn_alike_in_every_batch(words: dict[str, Any]) -> None:
    logits = torch.randn(90, 3000, generator=torch.Generator().manual_seed(0))
    draws = [key_of(index, 3) for index in range(90)]
    alone = [sample(logits[i : i + 1], [row(**words)], {}, draws[i : i + 1])[0] for i in range(90)]
    assert sample(logits, [row(**words)] * 90, {}, draws) == alone
    mixed = [row(**words) if index % 2 else row(temperature=0.7, top_p=0.5, top_k=50) for index in range(90)]
    assert sample(logits, mixed, {}, draws)[1::2] == alone[1::2]


def test_flat_distributions_need_more_than_the_first_candidates() -> None:
    logits = torch.zeros(1, 4000) + torch.arange(4000) * 1e-4
    probs = expected(logits[0].numpy(), row(top_p=0.9))
    assert (probs > 0).sum() > 2000
    for step in range(20):
        (token,) = sample(logits, [row(top_p=0.9)], {}, [key_of(0, step)])
        assert token == drawn(probs, key_of(0, step))[0]


def test_ties_go_to_the_lowest_id_and_ids_beyond_the_logits_are_never_taken() -> None:
    logits = torch.zeros(3, 40)
    greedy = row(temperature=0.0)
    beyond = TokenMask(packed([7, 9, 41, 63], 64), np.array([7, 9, 41, 63]))
    assert sample(logits, [greedy] * 3, {1: beyond, 2: TokenMask(beyond.bits)}, [0] * 3) == [0, 7, 7]
    only_beyond = TokenMask(packed([41], 64), np.array([41]))
    assert sample(logits, [greedy] * 3, {1: only_beyond, 2: TokenMask(only_beyond.bits)}, [0] * 3) == [
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


def test_rows_that_take_their_best_id_are_sampled_at_once() -> None:
    logits = torch.randn(5, VOCAB)
    logits[0, [7, 9]] = 9.0  # the first of both
    logits[1, 3], logits[2, 4], logits[3, :2] = math.nan, -math.inf, torch.tensor([math.inf, -math.inf])
    rows = [row(temperature=0.0), *(row(top_k=1) for _ in range(4))]
    found = Sampler().at_once(Logits(logits, logits, None), rows, {}, [5] * 5)
    assert found == [Sample(7), *[NOT_FINITE] * 3, Sample(int(logits[4].argmax()))]


@settings(max_examples=tries(200), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([32, VOCAB, 96]),  # words of a mask may end before the logits do, or behind them
    allowed=st.lists(st.sets(st.integers(0, 31)) | st.sets(st.integers(0, 95)), min_size=1, max_size=5),
)
def test_so_are_those_under_masks(seed: int, size: int, allowed: list[set[int]]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-2, 3, (len(allowed), VOCAB), generator=generator).float()  # many are equal
    logits[logits == -2] = torch.finfo(torch.float32).min / VOCAB
    rows, draws = [row(temperature=0.0) for _ in allowed], [5] * len(allowed)
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
    draws, given = [5, 5], Logits(logits, logits, None)
    assert Sampler().at_once(given, [plain, row(**words)], {}, draws) is None
    assert Sampler().at_once(given._replace(total=logits.logsumexp(-1)), [plain, plain], {}, draws) is None
