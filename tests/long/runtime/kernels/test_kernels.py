"""Every kernel gives what its plain twin gives. Without a GPU in Triton's interpreter: tiny shapes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton")

from runtime.kernels.elementwise import (
    plain_rms_norm,
    plain_rotate,
    plain_silu_mul,
    rms_norm,
    rotate,
    silu_mul,
)
from runtime.kernels.gumbel import halves
from runtime.kernels.kv_store import plain_store_kv, store_kv
from runtime.kernels.logprobs import gather_logprobs, plain_gather_logprobs
from runtime.kernels.merge_states import merge_states, plain_merge_states
from runtime.kernels.moe import (
    fused_experts,
    group_by_expert,
    grouped_matmul,
    plain_fused_experts,
    plain_grouped_matmul,
)
from runtime.kernels.paged_attention import States
from runtime.kernels.sampling import Changes, Draws, change, plain_change, plain_sample, sample

# The interpreter computes with numpy, which warns of infinity and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float32, torch.bfloat16]


def close(got: torch.Tensor, right: torch.Tensor) -> None:
    """The interpreter cuts off where it makes a bfloat16 of a float32."""
    at = {torch.float32: 2e-5, torch.bfloat16: 2e-2}[right.dtype]
    torch.testing.assert_close(got, right, atol=at, rtol=at)


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("size", "residual", "wide"), [(24, False, False), (16, True, True), (1, True, False)]
)
def test_rms_norm(dtype: torch.dtype, size: int, residual: bool, wide: bool) -> None:
    x, weight = noise(3, size, dtype=dtype), noise(size, dtype=dtype)
    streams = [noise(3, size, dtype=dtype)] * 2 if residual else [None, None]
    streams = [one if one is None else one.clone() for one in streams]
    close(
        rms_norm(x, weight, 1e-5, streams[0], wide=wide),
        plain_rms_norm(x, weight, 1e-5, streams[1], wide=wide),
    )
    if residual:
        close(*streams)  # type: ignore[arg-type]


def test_rms_norm_of_heads_with_a_weight_each() -> None:
    qkv, weight = noise(3, 5, 8), noise(4, 8)
    close(rms_norm(qkv[:, :4], weight, 1e-6), plain_rms_norm(qkv[:, :4], weight, 1e-6))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("dim", "turned"), [(16, 16), (12, 8), (10, 6)])
def test_rotary(dtype: torch.dtype, dim: int, turned: int) -> None:
    qkv = noise(3, 5, dim, dtype=dtype)
    angle = torch.rand(3, 1, turned // 2, device=DEVICE) * 6
    cos, sin = (
        torch.cat(parts, -1).to(dtype) for parts in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin()))
    )
    right = qkv.clone()
    rotate(qkv[:, :3], cos, sin)
    plain_rotate(right[:, :3], cos, sin)
    close(qkv, right)


@pytest.mark.parametrize("dtype", TYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    both = noise(3, 2 * 1030, dtype=dtype)
    close(silu_mul(both), plain_silu_mul(both))


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16])
def test_kv_store(kept: torch.dtype) -> None:
    qkv = noise(4, 7, 6)
    slots = torch.tensor([9, 3, 5, 0, 7], dtype=torch.int32, device=DEVICE)
    places = torch.tensor([4, -1, 0, 2], dtype=torch.int32, device=DEVICE)
    got, right = (torch.zeros(10, 2, 4, 6, dtype=kept, device=DEVICE) for _ in range(2))
    store_kv(qkv[:, 3:], got[:, 1], slots, places)
    plain_store_kv(qkv[:, 3:], right[:, 1], slots, places)
    close(got, right)
    assert got[:, 1].any(-1).any(-1).nonzero().flatten().tolist() == [5, 7, 9]


@pytest.mark.parametrize("sinks", [False, True])
def test_merged_states(sinks: bool) -> None:
    states = States(noise(6, 3, 10), 3 * noise(6, 3))
    states.sums[4] = -math.inf  # a tile of which this token saw nothing
    of = torch.tensor([3, 0, 4, 1, 5, 2], dtype=torch.int32, device=DEVICE)
    ends = torch.tensor([0, 3, 3, 4, 6], dtype=torch.int32, device=DEVICE)
    more = noise(3) if sinks else None
    got, right = (torch.full((4, 3, 10), 7.0, device=DEVICE) for _ in range(2))
    merge_states(states, of, ends, got, more)
    plain_merge_states(states, of, ends, right, more)
    close(got, right)
    assert (got[1] == 7.0).all()


def draws_of(rows: list[tuple[float, int, float, float, int, int]], masks: torch.Tensor) -> Draws:
    *columns, keys, of = zip(*rows)
    types = [torch.float32, torch.int32, torch.float32, torch.float32]
    return Draws(
        *(torch.tensor(column, dtype=dtype, device=DEVICE) for column, dtype in zip(columns, types)),
        torch.from_numpy(halves(keys)).to(DEVICE),
        torch.tensor(of, dtype=torch.int32, device=DEVICE),
        masks.to(DEVICE),
    )


def bits_of(allowed: torch.Tensor) -> torch.Tensor:
    """[rows, vocab] bool -> [rows, words] int32."""
    padded = torch.nn.functional.pad(allowed.cpu(), (0, -allowed.shape[1] % 32)).view(len(allowed), -1, 32)
    words = (padded.long() << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


@pytest.mark.parametrize("vocab", [70, 1100])
def test_sampling(vocab: int) -> None:
    """temperature, top_k, top_p, min_p, key, mask."""
    masks = bits_of(torch.stack((torch.rand(vocab) < 0.2, torch.zeros(vocab, dtype=torch.bool))))
    rows = [
        (0.0, 0, 1.0, 0.0, 3, -1),
        (0.0, 0, 1.0, 0.0, 3, 0),
        (1.0, 0, 1.0, 0.0, 77, -1),
        (1.0, 5, 1.0, 0.0, 5, -1),
        (0.7, 0, 0.8, 0.0, (1 << 64) - 1, 0),
        (1.3, 20, 0.5, 0.01, 2, 0),
        (1.0, 0, 1.0, 0.2, 6, -1),
        (1.0, 3, 0.0, 0.0, 6, -1),
        (1.0, 0, 1.0, 0.0, 1, 1),
    ]
    scores = 3 * noise(len(rows), vocab)
    scores[2, ::3] = -math.inf
    scores[3, 5:9] = scores[3].max()  # ties at the cut stay
    given = draws_of(rows, masks)
    got = sample(scores, given)
    assert got.tolist() == plain_sample(scores, given).tolist()
    assert got[0] == scores[0].argmax()
    assert got[-1] == -1


def test_penalties() -> None:
    scores = noise(2, 40)
    right = scores.clone()
    rows, columns = (torch.tensor(of, dtype=torch.int32, device=DEVICE) for of in ([0, 0, 1], [3, 39, 0]))
    factors, costs = (torch.tensor(of, device=DEVICE) for of in ([1.5, 2.0, 1.0], [0.5, 0.0, -2.0]))
    change(scores, Changes(rows, columns, factors, costs))
    plain_change(right, Changes(rows, columns, factors, costs))
    close(scores, right)
    assert (scores != noise(2, 40)).any()


def test_logprobs() -> None:
    logits = 5 * noise(5, 4200)
    logits[1, 7], logits[2, 4100], logits[3, ::2], logits[4, 9] = math.nan, math.inf, -50.0, -math.inf
    ids = torch.tensor([[0, 4199, 5]] * 5, device=DEVICE)
    got, right = gather_logprobs(logits, ids), plain_gather_logprobs(logits, ids)
    for mine, theirs in zip(got, right):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-5, equal_nan=True)
    assert got[1].isnan().tolist() == [False, True, True, False, True]


@pytest.mark.parametrize(("tokens", "top_k", "count"), [(1, 2, 8), (9, 2, 3), (40, 1, 2)])
def test_entries_are_grouped_by_expert(tokens: int, top_k: int, count: int) -> None:
    experts = torch.rand(tokens, count, device=DEVICE).topk(top_k).indices
    blocks = group_by_expert(experts, count, 16)
    assert blocks.size == 16
    found = sorted(blocks.entries[blocks.entries >= 0].tolist())
    assert found == list(range(tokens * top_k))
    for entries, expert in zip(blocks.entries.view(-1, 16), blocks.experts.tolist()):
        assert all(experts.flatten()[entry] == expert for entry in entries.tolist() if entry >= 0)


@pytest.mark.parametrize("dtype", TYPES)
def test_grouped_product(dtype: torch.dtype) -> None:
    x, weight = noise(5, 20, dtype=dtype), noise(3, 36, 20, dtype=dtype)
    experts = torch.tensor([[0, 2], [2, 0], [2, 0], [0, 2], [2, 0]], device=DEVICE)
    blocks, scales = group_by_expert(experts, 3, 16), torch.rand(10, device=DEVICE)
    got, right = (product(x, weight, blocks, 2, scales) for product in (grouped_matmul, plain_grouped_matmul))
    torch.testing.assert_close(got, right, atol=5e-2 if dtype == torch.bfloat16 else 1e-5, rtol=2e-2)


def test_nothing_is_taken() -> None:
    none = torch.zeros(0, 12, device=DEVICE)
    chosen = torch.zeros(0, 2, dtype=torch.int64, device=DEVICE)
    assert fused_experts(none, noise(4, 24, 12), noise(4, 12, 12), chosen, chosen.float()).shape == (0, 12)
    assert rms_norm(none, noise(12), 1e-5).shape == (0, 12)
    assert silu_mul(none).shape == (0, 6)


@pytest.mark.parametrize("biased", [False, True])
def test_experts(biased: bool) -> None:
    x, gate_up, down = noise(6, 16), noise(4, 24, 16), noise(4, 16, 12)
    weights, experts = torch.rand(6, 4, device=DEVICE).topk(2)
    given = (x, gate_up, down, experts, weights)
    if biased:
        given += (
            lambda both: both.clamp(max=0.5).unflatten(-1, (2, -1)).prod(-2),
            (noise(4, 24), noise(4, 16)),
        )
    close(fused_experts(*given), plain_fused_experts(*given))
