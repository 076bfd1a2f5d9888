"""Penalties and biases against numpy, carried from step to step."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.engine.sampling.penalties import Histogram, Histograms, adjust, every, listed
from runtime.plan import Row, Run
from runtime.protocol.sampling import SamplingParams
from tests.exploring import tries

VOCAB = 40
IDS = st.lists(st.integers(0, VOCAB - 1), max_size=30)
PARAMS = st.builds(
    SamplingParams,
    frequency_penalty=st.sampled_from([0.0, 0.5, -2.0]),
    presence_penalty=st.sampled_from([0.0, 1.25, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5, 2.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-50, 50, width=32), max_size=4),
)


def row(seq: int, params: SamplingParams, prompt: list[int], output: list[int]) -> Row:
    return Row(seq, (0,), 0, (Run(0, 1),), params, prompt=prompt, output=output)


def expected(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    scores = logits.astype(np.float64).copy()
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    counts = np.bincount(output, minlength=VOCAB)
    scores -= counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    return scores


@settings(max_examples=tries(100), deadline=None)
@given(st.lists(st.tuples(PARAMS, IDS, IDS), min_size=1, max_size=5), st.integers(0, 2**31), st.data())
def test_rows_and_steps(requests: list, seed: int, data: st.DataObject) -> None:
    """Several requests grow over several steps; some are left out of a step, as a scheduler would."""
    numbers, histograms = np.random.default_rng(seed), Histograms()
    outputs: list[list[int]] = [[] for _ in requests]
    for _ in range(4):
        some = [index for index in range(len(requests)) if data.draw(st.booleans())]
        rows = [row(index, requests[index][0], requests[index][1], outputs[index]) for index in some]
        logits = numbers.normal(scale=3.0, size=(len(some), VOCAB)).astype(np.float32)
        scores = torch.from_numpy(logits.copy())
        adjust(scores, rows, histograms, every(VOCAB))
        for place, index in enumerate(some):
            params, prompt, _ = requests[index]
            right = expected(logits[place], params, prompt, outputs[index])
            np.testing.assert_allclose(scores[place].numpy(), right, rtol=1e-5, atol=1e-5)
        # The same where only some ids have a column.
        lists = [np.unique(numbers.integers(0, VOCAB, 9)) for _ in some]
        width = max((len(ids) for ids in lists), default=0)
        sparse = torch.full((len(some), width), 7.0)
        for place, ids in enumerate(lists):
            sparse[place, : len(ids)] = torch.from_numpy(logits[place, ids])
        adjust(sparse, rows, histograms, listed(lists))
        for place, (index, ids) in enumerate(zip(some, lists)):
            right = expected(logits[place], requests[index][0], requests[index][1], outputs[index])[ids]
            np.testing.assert_allclose(sparse[place, : len(ids)].numpy(), right, rtol=1e-5, atol=1e-5)
            assert (sparse[place, len(ids) :] == 7.0).all()
        for index, (_, _, more) in enumerate(requests):
            outputs[index] += more[len(outputs[index]) :][:7]


def test_what_is_known_is_not_counted_again() -> None:
    histogram = Histogram([3, 3, 1])
    histogram.follow([5, 3])
    assert sorted(zip(histogram.ids.tolist(), histogram.counts.tolist())) == [(1, 0), (3, 1), (5, 1)]
    histogram.follow([5, 3, 5])
    assert dict(zip(histogram.ids.tolist(), histogram.counts.tolist()))[5] == 2
    assert histogram.known == 3


def test_a_handle_used_again_starts_anew() -> None:
    histograms, params = Histograms(), SamplingParams(frequency_penalty=1.0)
    assert histograms.of(row(1, params, [], [4, 4])).counts.tolist() == [2]
    histograms.release([1, 2])
    assert len(histograms) == 0
    assert histograms.of(row(1, params, [], [9])).ids.tolist() == [9]
    assert histograms.of(row(1, params, [], [])).ids.tolist() == [], "shorter than before: not the same text"
    assert histograms.of(row(1, params, [], [5, 6, 7])).ids.tolist() == [5, 6, 7]
    assert histograms.of(row(1, params, [], [5, 8, 8, 9])).ids.tolist() == [5, 8, 9], (
        "cut back, then other text"
    )


def test_many_ids() -> None:
    histogram = Histogram()
    output = [n * n % 5000 for n in range(3000)]
    for end in range(0, 3001, 100):
        histogram.follow(output[:end])
    ids, counts = np.unique(output, return_counts=True)
    assert dict(zip(histogram.ids.tolist(), histogram.counts.tolist())) == dict(
        zip(ids.tolist(), counts.tolist())
    )


def test_nothing_to_do() -> None:
    assert not SamplingParams().adjusts_logits
    assert SamplingParams(logit_bias={1: 1.0}).adjusts_logits
    assert SamplingParams(presence_penalty=0.1).adjusts_logits
