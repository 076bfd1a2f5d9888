"""The sampling kernel says what sorting says, whatever way it takes: rows of all kinds of numbers, with room
for few of the columns that might stay, so that some rows overflow it. Without a GPU in Triton's
interpreter."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from runtime.kernels import sampling
from runtime.kernels.gumbel import gumbel, halves
from runtime.kernels.sampling import Draws, plain_sample, sample
from tests.long.runtime.kernels.test_kernels import DEVICE, bits_of

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


def scores_of(kind: str, rows: int, vocab: int, dice: torch.Generator) -> torch.Tensor:
    scores = torch.randn(rows, vocab, generator=dice)
    match kind:
        case "flat":
            scores *= 1e-3
        case "peaked":
            scores *= 6
        case "ties":
            scores = scores.round()
        case "same":
            scores = torch.ones_like(scores)
        case "holes":
            scores[torch.rand(rows, vocab, generator=dice) < 0.3] = torch.nan
            scores[:, ::7] = -torch.inf
    return scores


@pytest.mark.parametrize("kind", ["plain", "flat", "peaked", "ties", "same", "holes"])
@pytest.mark.parametrize("sizes", [(128, 32, 16, 16), (4096, 8192, 1024, 256)], ids=["little room", "room"])
def test_as_by_sorting(kind: str, sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in zip(("BLOCK", "CAP", "CHUNK", "FEW"), sizes):
        monkeypatch.setattr(sampling, name, size)
    draw, dice = random.Random(kind), torch.Generator().manual_seed(len(kind))
    rows, vocab = 12, 333
    masks = bits_of(torch.rand(3, vocab, generator=dice) < torch.tensor([[0.02], [0.5], [0.0]]))
    columns = [
        [draw.choice((0.0, 0.3, 1.0, 1.0, 1.7)) for _ in range(rows)],
        [draw.choice((0, 0, 1, 3, 40, 332, 333, 5000)) for _ in range(rows)],
        [draw.choice((1.0, 1.0, 0.0, 0.3, 0.9, 0.999999)) for _ in range(rows)],
        [draw.choice((0.0, 0.0, 0.05, 0.6, 1.0)) for _ in range(rows)],
        [draw.choice((-1, -1, 0, 1, 2)) for _ in range(rows)],
    ]
    types = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int32)
    *limits, of = (torch.tensor(column, dtype=dtype, device=DEVICE) for column, dtype in zip(columns, types))
    keys = torch.from_numpy(halves([draw.getrandbits(64) for _ in range(rows)])).to(DEVICE)
    given = Draws(*limits, keys, of, masks.to(DEVICE))
    scores = scores_of(kind, rows, vocab, dice).to(DEVICE)
    got, right = sample(scores, given).tolist(), plain_sample(scores, given).tolist()
    told = [" ".join(str(column[row]) for column in columns) for row in range(rows)]
    assert list(zip(told, got)) == list(zip(told, right))


def test_rows_that_are_not_finite() -> None:
    scores = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    scores[1, 3], scores[2, 69], scores[3, 0] = torch.nan, torch.inf, -torch.inf
    ones, none = torch.ones(5, device=DEVICE), torch.zeros(5, dtype=torch.int32, device=DEVICE)
    masks = bits_of(torch.arange(70)[None] == 8).to(DEVICE)
    keys = torch.zeros(5, 2, dtype=torch.int32, device=DEVICE)
    given = Draws(ones, none, ones, ones * 0, keys, none, masks)
    assert sample(scores.to(DEVICE), given, check=True).tolist() == [8, -2, -2, -2, 8]
    assert plain_sample(scores.to(DEVICE), given, check=True).tolist() == [8, -2, -2, -2, 8]
    assert sample(scores.to(DEVICE), given).tolist() == [8] * 5


@triton.jit
def _noise(ids, keys, out, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    lower, upper = tl.load(keys).to(tl.uint32, bitcast=True), tl.load(keys + 1).to(tl.uint32, bitcast=True)
    tl.store(out + at, sampling._gumbel(tl.load(ids + at), lower, upper))


@pytest.mark.parametrize("key", [0, 1 << 32, (1 << 64) - 1, 0x9D2C5680EFC60000])
def test_noise_has_the_same_bits_in_the_kernel(key: int) -> None:
    ids = torch.cat((torch.arange(1 << 15), torch.randint(0, 2**31 - 1, (1 << 15,)))).int().to(DEVICE)
    keys, out = torch.from_numpy(halves([key])).to(DEVICE), torch.empty(1 << 16, device=DEVICE)
    _noise[(64,)](ids, keys, out, SIZE=1024, enable_fp_fusion=False)
    assert torch.equal(out.cpu(), gumbel(keys.cpu(), ids.cpu())[0])
