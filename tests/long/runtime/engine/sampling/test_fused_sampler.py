"""The kernels' sampler gives the tokens of the plain one. Without a GPU its kernels are interpreted."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from runtime.engine.sampling.fused import FusedSampler
from runtime.engine.sampling.logprobs import NOT_FINITE, Logits
from runtime.engine.sampling.sampler import NOTHING_ALLOWED, Sampler
from runtime.plan import Row, Run, Sample, TokenMask
from runtime.protocol.sampling import SamplingParams

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinity, in the interpreter
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 70
_SEQS = itertools.count(1)


def row(output: tuple[int, ...] = (), prompt: tuple[int, ...] = (), **words: Any) -> Row:
    return Row(next(_SEQS), (0,), 0, (Run(0, 1),), SamplingParams(**words), output=output, prompt=prompt)


def mask_of(ids: list[int], sparse: bool = False) -> TokenMask:
    allowed = np.zeros(96, dtype=np.uint8)
    allowed[ids] = 1
    bits = np.packbits(allowed, bitorder="little").view(np.uint32)
    return TokenMask(bits, np.array(sorted(ids)) if sparse else None)


ROWS = [
    row(temperature=0.0),
    row(temperature=0.8),
    row(temperature=1.3, top_k=5),
    row(top_p=0.6, min_p=0.05),
    row(temperature=0.0, frequency_penalty=2.0, presence_penalty=1.0, output=(3, 3, 9)),
    row(repetition_penalty=1.7, prompt=(1, 2, 80), output=(5, 5, 6)),
    row(logit_bias={"7": 50.0, "400": 3.0}),
    row(repetition_penalty=1.2, logit_bias={"5": -4.0, "6": 1.0}, prompt=(5,), output=(6,)),
    row(temperature=0.9),
    row(temperature=0.0),
    row(temperature=0.7),
]
MASKS = {8: mask_of([4, 40, 69, 90]), 9: mask_of([2, 33], sparse=True), 10: mask_of([])}


def logits_of(rows: int) -> torch.Tensor:
    return (3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(5))).to(DEVICE)


def test_tokens_equal_the_plain_samplers() -> None:
    logits, draws = logits_of(len(ROWS)), [number << 50 | number for number in range(len(ROWS))]
    before = logits.clone()
    got = FusedSampler().sample(logits, ROWS, MASKS, draws)
    assert got == Sampler().sample(logits, ROWS, MASKS, draws)
    assert torch.equal(logits, before)
    assert got[10] == NOTHING_ALLOWED


def test_samples_with_their_log_probabilities() -> None:
    logits = logits_of(4)
    logits[2, 5] = math.nan
    rows = [*ROWS[:3], Row(99, (0,), 0, (Run(0, 1),), SamplingParams(temperature=0.0), logprob=False)]
    given = Logits(logits, logits, logits.logsumexp(-1))
    found = FusedSampler().at_once(given, rows, {0: MASKS[8], 1: MASKS[10]}, [1] * 4)
    assert found is not None
    first, nothing, bad, last = found
    best = max([4, 40, 69], key=lambda token: float(logits[0, token]))
    assert isinstance(first, Sample)
    assert first.token == best
    assert first.logprob == pytest.approx(float(logits[0].log_softmax(-1)[best]), abs=1e-5)
    assert (nothing, bad) == (NOTHING_ALLOWED, NOT_FINITE)
    assert last == Sample(int(logits[3].argmax()))


def test_what_is_not_made_at_once() -> None:
    logits = logits_of(1)
    given = Logits(logits, logits, None)
    processed = row(custom_logit_processor="token_bias")
    ids = Row(1, (0,), 0, (Run(0, 1),), SamplingParams(), token_ids=(1,))
    for one in (processed, ids):
        assert FusedSampler().at_once(given, [one], {}, [0]) is None


def test_rows_with_a_logit_processor_too() -> None:
    some = {"allowed_token_ids": [3, 9, 40]}
    rows = [
        *ROWS,
        row(custom_logit_processor="allowed_token_ids", custom_params=some),
        row(custom_logit_processor="allowed_token_ids", custom_params=some, temperature=0.0),
        row(custom_logit_processor="odd"),
    ]
    logits, draws = logits_of(len(rows)), [number << 50 | number for number in range(len(rows))]
    masks = {**MASKS, len(ROWS): mask_of([3, 4]), len(ROWS) + 1: mask_of([5])}
    got = FusedSampler().sample(logits, rows, masks, draws)
    assert got == Sampler().sample(logits, rows, masks, draws)
    assert got[len(ROWS)] == 3
    assert "allows no token" in str(got[-2]) or "allow no token" in str(got[-2])
    assert "'odd'" in str(got[-1])
