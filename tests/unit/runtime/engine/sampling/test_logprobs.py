"""Log-probabilities and hidden states of rows: against numpy, against transformers, in bounded memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.runner import TorchRunner
from runtime.engine.sampling import logprobs
from runtime.engine.sampling.logprobs import NOT_FINITE, ScoreRequest, scores_of
from runtime.plan import Sample
from runtime.protocol.errors import InternalFault
from runtime.protocol.sampling import SamplingParams
from tests.exploring import tries

VOCAB = 23


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    best = wide.max(-1, keepdims=True)
    return wide - best - np.log(np.exp(wide - best).sum(-1, keepdims=True))


@settings(max_examples=tries(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 9), st.integers(0, VOCAB + 5), st.lists(st.integers(0, VOCAB - 1), max_size=4)
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 40),
    st.integers(0, 2**31),
)
def test_scores(asked: list, rows: int, seed: int) -> None:
    numbers = np.random.default_rng(seed)
    wants = [ScoreRequest(length, top, tuple(ids)) for length, top, ids in asked]
    count = sum(want.length for want in wants)
    logits = numbers.normal(scale=4.0, size=(count, VOCAB)).astype(np.float32)
    targets = numbers.integers(0, VOCAB, count)
    seen: list[int] = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[0])
        return hidden

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "CHUNK_BYTES", rows * 4 * VOCAB)
        got = scores_of(torch.from_numpy(logits), torch.from_numpy(targets), wants, head, VOCAB)
    assert max(seen, default=0) <= rows
    right = log_softmax(logits)
    np.testing.assert_allclose(got.values.numpy(), right[np.arange(count), targets], atol=1e-5)
    at = 0
    for want in wants:
        for place in range(at, at + want.length):
            top = got.tops[place]
            assert len(top) == min(want.top, VOCAB)
            np.testing.assert_allclose(
                [value for _, value in top], -np.sort(-right[place])[: len(top)], atol=1e-5
            )
            np.testing.assert_allclose(
                [value for _, value in top], right[place, [i for i, _ in top]], atol=1e-5
            )
            np.testing.assert_allclose(got.ids[place], right[place, list(want.ids)], atol=1e-5)
        at += want.length


def load(tiny: Any, **fields: Any) -> TorchRunner:
    spec = ModelSpec.from_dir(tiny.path)
    return TorchRunner.load(tiny.path, spec, RunnerConfig(dtype="float32", max_total_tokens=512, **fields))


def states(tiny: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return tiny.model.model(torch.tensor([ids])).last_hidden_state[0]


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_rows_say_what_they_are_asked(tiny: Any, prompt: Any, drive: Any, chunk: int) -> None:
    one = tiny("qwen3")
    runner = load(one)
    try:
        driver, ids = drive(runner), prompt(40)
        right = torch.from_numpy(log_softmax(one.logits(ids).numpy()))
        hidden = states(one, ids)
        seq, other = driver.new(), driver.new()
        for first in range(0, 40, chunk):
            part = ids[first : first + chunk]
            last = first + len(part) == 40
            mine = driver.ask(
                seq,
                part,
                sample=last,
                scores=tuple((at, 5) for at in range(len(part))),
                score_top=3,
                token_ids=(9, 0),
                top_logprobs=4 if last else 0,
                hidden="all",
                logprob=last,
            )
            plain = driver.ask(other, part, sample=True, logprob=False, hidden="last")
            result, quiet = driver.step([mine, plain])
            for at in range(len(part)):
                truth = right[first + at]
                assert result.scores[at] == pytest.approx(float(truth[5]), abs=1e-4)
                assert result.score_token_ids[at] == pytest.approx(truth[[9, 0]].tolist(), abs=1e-4)
                assert [token for token, _ in result.score_tops[at]] == truth.topk(3).indices.tolist()
                assert result.hidden[at] == pytest.approx(hidden[first + at].tolist(), abs=1e-3)
            assert quiet.samples == (Sample(quiet.token),)
            assert quiet.scores == quiet.score_tops == ()
            assert len(quiet.hidden) == 1
            assert quiet.hidden[0] == pytest.approx(hidden[first + len(part) - 1].tolist(), abs=1e-3)
        assert result.samples[0].token_ids == pytest.approx(right[-1][[9, 0]].tolist(), abs=1e-4)
        assert [token for token, _ in result.samples[0].top] == right[-1].topk(4).indices.tolist()
        assert result.samples[0].logprob == pytest.approx(float(right[-1].max()), abs=1e-4)
    finally:
        runner.close()


def test_scaled_draws_are_told_by_the_models_own_numbers(tiny: Any, prompt: Any, drive: Any) -> None:
    """Temperature, penalties, biases and masks change the draw, not the log-probability that is told."""
    one = tiny("llama")
    runner = load(one)
    try:
        driver, ids = drive(runner), prompt(20)
        right = log_softmax(one.logits(ids)[-1:].numpy())[0]
        words = SamplingParams(temperature=1.5, seed=3, logit_bias={7: 60.0}, frequency_penalty=1.0)
        (result,) = driver.step([driver.ask(driver.new(), ids, sampling=words, output=(7,))])
        assert result.token == 7
        assert result.samples[0].logprob == pytest.approx(right[7], abs=1e-4)
    finally:
        runner.close()


def test_numbers_that_are_not_finite_concern_their_row(tiny: Any, prompt: Any, drive: Any) -> None:
    runner = load(tiny("llama"))
    try:
        driver, ids = drive(runner), prompt(12)
        sick, well = driver.new(), driver.new()
        driver.step([driver.ask(sick, ids), driver.ask(well, ids)])
        with torch.inference_mode():
            for start, length in sick.path[-1].runs:
                runner._attention.pool.kv[start : start + length] = torch.nan
        asks = {"scores": ((0, 3),), "score_top": 2, "hidden": "all"}
        first, second = driver.step([driver.ask(sick, [5], **asks), driver.ask(well, [5], **asks)])
        assert first.error == NOT_FINITE
        assert (first.token, first.hidden, first.score_tops) == (None, (), ())
        assert second.error is None
        assert len(second.score_tops[0]) == 2
        (only,) = driver.step([driver.ask(sick, [5], sample=False, hidden="last")])
        assert only.error == NOT_FINITE
    finally:
        runner.close()


def test_ids_outside_the_vocabulary_are_a_broken_plan(tiny: Any, prompt: Any, drive: Any) -> None:
    runner = load(tiny("llama"))
    try:
        driver = drive(runner)
        with pytest.raises(InternalFault, match="token_ids"):
            driver.step([driver.ask(driver.new(), prompt(3), token_ids=(160,))])
    finally:
        runner.close()
