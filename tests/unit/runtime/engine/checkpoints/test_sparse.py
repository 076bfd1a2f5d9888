"""Logits of the allowed ids alone: the same tokens as from all logits, whatever else is in the step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from runtime.config.model import ModelSpec
from runtime.config.runner import RunnerConfig
from runtime.engine.runner import TorchRunner
from runtime.engine.sampling.logprobs import NOT_FINITE
from runtime.engine.sampling.sampler import NOTHING_ALLOWED
from runtime.layers.dense import DenseLinear
from runtime.plan import TokenMask
from runtime.protocol.sampling import SamplingParams

VOCAB = 160


@pytest.fixture
def load(tiny: Any) -> Iterator[Callable[..., TorchRunner]]:
    runners: list[TorchRunner] = []

    def make(case: str = "llama", **config: Any) -> TorchRunner:
        path = tiny(case).path
        settings = RunnerConfig(**{"max_total_tokens": 4096, "dtype": "float32", "device": "cpu", **config})
        runners.append(TorchRunner.load(path, ModelSpec.from_dir(path), settings))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


@pytest.fixture
def wholes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Over how many rows the whole head was computed, each time."""
    from runtime.models.decoder import Decoder

    seen: list[int] = []
    whole = Decoder.logits

    def counting(self: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.shape[0])
        return whole(self, hidden)

    monkeypatch.setattr(Decoder, "logits", counting)
    return seen


def mask(ids: list[int]) -> TokenMask:
    allowed = np.zeros(VOCAB, dtype=np.uint8)
    allowed[ids] = 1
    return TokenMask(
        np.packbits(allowed, bitorder="little").view(np.uint32), np.array(sorted(ids), dtype=np.int64)
    )


PARAMS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 2.5, "top_p": 0.8, "seed": 4},
    {"temperature": 1.5, "top_k": 2, "min_p": 0.05, "seed": 5},
    {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 1.0, "seed": 9, "logit_bias": {7: 4.0, 9: -3.0}},
]


@pytest.mark.parametrize("case", ["llama", "llama, tied, biased", "qwen2"])
def test_the_same_tokens_as_from_all_logits(
    load: Any, drive: Any, prompt: Any, wholes: list[int], case: str
) -> None:
    pick = random.Random(1)
    driver = drive(load(case))
    for round_ in range(6):
        asks, masks = [], {}
        for number, words in enumerate(PARAMS):
            ids = prompt(6 + number, seed=round_ * 10 + number)
            masks[number] = mask(sorted(pick.sample(range(VOCAB), pick.randint(1, 6))))
            extra = {"sampling": SamplingParams(**words), "prompt": tuple(ids), "output": (7, 7, 9)}
            asks.append((ids, {**extra, "logprob": False}))
        dense = driver.step(
            [driver.ask(driver.new(), ids, **extra, masked=False) for ids, extra in asks], masks
        )
        assert wholes.pop() == len(PARAMS)
        sparse = driver.step(
            [driver.ask(driver.new(), ids, **extra, masked=True) for ids, extra in asks], masks
        )
        assert not wholes
        assert [one.token for one in sparse] == [one.token for one in dense]
        assert all(one.samples[0].logprob is None and one.error is None for one in sparse)


def test_rows_that_need_the_whole_row_get_it(
    load: Any, drive: Any, prompt: Any, tiny: Any, wholes: list[int]
) -> None:
    """Free rows, dense masks, log-probabilities, processors and sparse rows in one step."""
    driver, ids = drive(load()), [prompt(5, seed=seed) for seed in range(7)]
    few, most = [3, 40, 41], [one for one in range(VOCAB) if one % 3]
    banned = SamplingParams(
        temperature=0.0, custom_logit_processor="bad_words", custom_params={"banned_token_ids": [3]}
    )
    words: list[dict[str, Any]] = [
        {},
        {"masked": True},
        {"masked": True, "logprob": True},
        {"masked": True, "top_logprobs": 3},
        {"masked": True, "token_ids": (5,)},
        {"masked": True, "sampling": banned},
        {"masked": True},
    ]
    masks = {place: mask(few) for place in range(1, 6)} | {6: TokenMask(mask(most).bits)}
    asks = [driver.ask(driver.new(), one, **{"logprob": False, **more}) for one, more in zip(ids, words)]
    got = driver.step(asks, masks)
    assert wholes == [6]
    right = [tiny("llama").logits(one)[-1] for one in ids]
    allowed = [list(range(VOCAB)), few, few, few, few, few[1:], most]
    assert [one.token for one in got] == [max(a, key=r.__getitem__) for a, r in zip(allowed, right)]
    assert [one.samples[0].logprob is None for one in got] == [True, True, False, True, True, True, True]
    logprobs = right[2].log_softmax(-1)
    assert got[2].samples[0].logprob == pytest.approx(float(logprobs[got[2].token]), abs=1e-4)
    assert [token for token, _ in got[3].samples[0].top] == right[3].topk(3).indices.tolist()
    assert got[4].samples[0].token_ids == pytest.approx([float(right[4].log_softmax(-1)[5])], abs=1e-4)


def test_one_id_needs_no_logits_and_none_is_an_error(
    load: Any, drive: Any, prompt: Any, monkeypatch: Any
) -> None:
    driver = drive(load())
    asked: list[int] = []
    monkeypatch.setattr(
        "runtime.models.decoder.Decoder.logits_of", lambda self, hidden, ids: asked.append(len(ids))
    )
    shared = mask([17])
    asks = [driver.ask(driver.new(), prompt(4, seed=s), masked=True, logprob=False) for s in range(3)]
    got = driver.step(asks, {0: shared, 1: shared, 2: mask([])})
    assert [one.token for one in got] == [17, 17, None]
    assert got[2].error == NOTHING_ALLOWED
    assert not asked


def test_rows_with_one_list_share_a_product(load: Any, drive: Any, prompt: Any, monkeypatch: Any) -> None:
    from runtime.models.decoder import Decoder

    shapes: list[tuple[int, int]] = []
    real = Decoder.logits_of

    def seen(self: Decoder, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        shapes.append((hidden.shape[0], len(ids)))
        return real(self, hidden, ids)

    monkeypatch.setattr(Decoder, "logits_of", seen)
    driver, one, other = drive(load()), mask([1, 2, 3]), mask([4, 5])
    asks = [driver.ask(driver.new(), prompt(4, seed=s), masked=True, logprob=False) for s in range(3)]
    got = driver.step(asks, {0: one, 1: other, 2: one})
    assert sorted(shapes) == [(1, 2), (2, 3)]
    assert all(result.token in allowed for result, allowed in zip(got, ([1, 2, 3], [4, 5], [1, 2, 3])))


def test_many_different_ids_are_one_whole_product(
    load: Any, drive: Any, prompt: Any, wholes: list[int]
) -> None:
    driver = drive(load())
    asks = [driver.ask(driver.new(), prompt(4, seed=s), masked=True, logprob=False) for s in range(3)]
    driver.step(asks, {place: mask(list(range(20 * place, 20 * place + 20))) for place in range(3)})
    assert wholes == [3]


def test_numbers_that_are_not_finite_stay_in_their_row(load: Any, drive: Any, prompt: Any) -> None:
    runner = load()
    driver = drive(runner)
    with torch.inference_mode():
        runner._decoder._embedding.table[150] = float("nan")
    asks = [driver.ask(driver.new(), ids, masked=True, logprob=False) for ids in ([5, 6], [5, 150])]
    got = driver.step(asks, {0: mask([3, 4]), 1: mask([3, 4])})
    assert (got[0].error, got[1].error) == (None, NOT_FINITE)
    assert got[0].token in (3, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_some_outputs_are_those_of_the_whole_product(dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = DenseLinear(torch.randn(300, 64, dtype=dtype), torch.randn(300, dtype=dtype) if bias else None)
    ids = torch.tensor([0, 7, 8, 200, 299])
    for rows in (1, 2, 9):
        x = torch.randn(rows, 64, dtype=dtype)
        exact = layer(x)[:, ids].float()
        some = layer.some(x, ids)
        assert some.dtype == dtype
        assert torch.allclose(some.float(), exact, atol=1e-5 if dtype == torch.float32 else 0.13, rtol=1e-2)
