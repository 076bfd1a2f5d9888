"""Every registered attention implementation gives what the reference gives, whatever the plan looks like."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence

import pytest
import torch

from runtime.attention.base import ATTENTION, PLAIN, Attention, Scoring
from runtime.attention.pool import KVPool, KVShape
from runtime.attention.reference import Reference
from runtime.plan import Row, Run, Segment, StepPlan
from runtime.protocol.sampling import SamplingParams

# Without a GPU, kernels are interpreted, which is far too slow for this; see tests/unit/runtime/attention.
ON_GPU = {"triton"}
IMPLEMENTATIONS = [
    name for name in ATTENTION if name != "reference" and (name not in ON_GPU or torch.cuda.is_available())
]
SLOTS = 2048
FLOAT = KVShape(1, 2, 16, torch.float32, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products: more threads only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Slots:
    """Hands out slots in pages: page size 0 = one run per call, else pages in random order."""

    def __init__(self, page: int, seed: int) -> None:
        self._page = page
        size = page or 1
        self._free = [Run(start, size) for start in range(0, SLOTS - size + 1, size)]
        if page:
            random.Random(seed).shuffle(self._free)

    def take(self, tokens: int) -> tuple[Run, ...]:
        runs: list[Run] = []
        size = self._page or 1
        while tokens > 0:
            run = self._free.pop(0)
            used = min(size, tokens)
            joined = runs and runs[-1].start + runs[-1].length == run.start
            if joined and not self._page:
                runs[-1] = Run(runs[-1].start, runs[-1].length + used)
            else:
                runs.append(Run(run.start, used))
            tokens -= used
        return tuple(runs)


def plan_of(
    rows: Sequence[tuple[Sequence[int], int]], lengths: Sequence[int], page: int, seed: int
) -> StepPlan:
    """rows: (segments from the root down, new tokens); segments are numbered, `lengths` are theirs."""
    slots = Slots(page, seed)
    runs = [slots.take(length) for length in lengths]
    users: dict[int, list[int]] = {}
    start: dict[int, int] = {}
    made = []
    for index, (path, new) in enumerate(rows):
        position = 0
        for segment in path:
            assert start.setdefault(segment, position) == position
            users.setdefault(segment, []).append(index)
            position += lengths[segment]
        made.append(Row(index, (0,) * new, position, slots.take(new), SamplingParams()))
    segments = tuple(Segment(runs[number], tuple(mine), start[number]) for number, mine in users.items())
    return StepPlan(tuple(made), segments)


def device_of(kind: type[Attention[KVPool]]) -> torch.device:
    """Where it is tested."""
    on_gpu = torch.cuda.is_available() and any(ATTENTION.load(name) is kind for name in ON_GPU)
    return torch.device("cuda" if on_gpu else "cpu")


def compare(
    kind: type[Attention[KVPool]],
    plan: StepPlan,
    windows: Sequence[int | None] = (None,),
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    tolerance: float = 2e-5,
    across: bool = False,
    kept: torch.dtype | None = None,
    scoring: Scoring = PLAIN,
) -> None:
    """`across`: the new tokens' numbers lie side by side in memory, as some products give them. kept: what
    the pool's numbers are; None: as the new tokens'."""
    generator = torch.Generator().manual_seed(1)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    device = device_of(kind)
    shape = KVShape(len(windows), kv_heads, dim, kept or dtype, device)
    tested, reference = (one(shape, SLOTS, heads, windows, scoring) for one in (kind, Reference))
    filled = noise(SLOTS, len(windows), 2 * kv_heads, dim).to(shape.dtype).float()
    # Slots that no segment names must not matter, even if they hold no numbers.
    named = torch.zeros(SLOTS, dtype=torch.bool)
    for run in (run for segment in plan.segments for run in segment.runs):
        named[run.start : run.start + run.length] = True
    filled[~named] = torch.nan
    steps = []
    for one in (reference, tested):
        one.pool.kv.copy_(filled)
        steps.append(one.begin(plan))
    count = plan.token_count
    for layer in range(len(windows)):
        qkv = noise(count, heads + 2 * kv_heads, dim)
        given = qkv.permute(1, 2, 0).contiguous().permute(2, 0, 1) if across else qkv
        right, got = steps[0](layer, qkv), steps[1](layer, given)
        assert got.shape == right.shape == (count, heads * dim)
        assert torch.isfinite(right).all()
        torch.testing.assert_close(got, right, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(tested.pool.kv.float(), reference.pool.kv.float(), equal_nan=True)


# (rows, lengths of the segments): a row is (its segments from the root down, how many new tokens)
PLANS: dict[str, tuple[list[tuple[list[int], int]], list[int]]] = {
    "first token": ([([], 1)], []),
    "one prefill": ([([], 37)], []),
    "one decode": ([([0], 1)], [51]),
    "long decode": ([([0], 1)], [700]),
    "two prefills": ([([], 37), ([], 20)], []),
    "chunk": ([([0], 40)], [90]),
    "chunk after chunk": ([([0, 1], 33)], [90, 65]),
    "decodes of different lengths": ([([n], 1) for n in range(6)], [5, 40, 60, 100, 200, 300]),
    "equal decodes": ([([n], 1) for n in range(4)], [24] * 4),
    "shared prefix, decodes": ([([0, n + 1], 1) for n in range(5)], [300, 3, 9, 20, 40, 150]),
    "shared prefix, extends": ([([0], n + 1) for n in range(5)], [300]),
    "shared prefix, short extends and decodes": (
        [([0, 1], 8), ([0, 2], 1), ([0, 3], 3), ([0, 4], 16), ([0, 5], 17)],
        [100, 5, 9, 20, 7, 11],
    ),
    "tree of prefixes": (
        [([0, 1, 3], 1), ([0, 1, 4], 2), ([0, 2, 5], 1), ([0, 2], 1), ([0], 30), ([6], 1), ([], 4)],
        [70, 65, 80, 5, 6, 90, 12],
    ),
    "rows of one prefix apart": ([([0], 1), ([1], 1), ([0], 1), ([1], 1), ([0], 5)], [80, 90]),
    "prefill between decodes": ([([0], 1), ([], 200), ([1], 1), ([2], 50)], [30, 64, 65]),
    "many rows": ([([0, 1 + n % 7], 1 + (n % 3 == 0)) for n in range(40)], [128, 3, 40, 64, 65, 1, 90, 130]),
}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("page", [0, 1, 16])
@pytest.mark.parametrize("shape", PLANS)
def test_equals_the_reference(name: str, shape: str, page: int) -> None:
    rows, lengths = PLANS[shape]
    compare(ATTENTION.load(name), plan_of(rows, lengths, page, seed=page))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", PLANS)
def test_however_the_numbers_lie_in_memory(name: str, shape: str) -> None:
    rows, lengths = PLANS[shape]
    compare(ATTENTION.load(name), plan_of(rows, lengths, 1, seed=8), windows=(None, 50), across=True)


@pytest.mark.parametrize("name", ["torch_views", "torch_plain"])
@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
@pytest.mark.parametrize("shape", PLANS)
def test_pools_of_fewer_bits(name: str, shape: str, kept: torch.dtype) -> None:
    """New tokens' keys are rounded like those before them."""
    rows, lengths = PLANS[shape]
    compare(ATTENTION.load(name), plan_of(rows, lengths, 4, seed=9), windows=(None, 7), kept=kept)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [1, 7, 100])
@pytest.mark.parametrize("shape", PLANS)
def test_windows(name: str, shape: str, window: int) -> None:
    rows, lengths = PLANS[shape]
    compare(ATTENTION.load(name), plan_of(rows, lengths, window % 2, seed=3), windows=(window, None))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(1, 1, 8), (3, 3, 32), (6, 2, 20), (8, 1, 64)])
@pytest.mark.parametrize("shape", ["tree of prefixes", "many rows", "chunk"])
def test_head_shapes(name: str, shape: str, heads: int, kv_heads: int, dim: int) -> None:
    rows, lengths = PLANS[shape]
    compare(ATTENTION.load(name), plan_of(rows, lengths, 1, seed=5), heads=heads, kv_heads=kv_heads, dim=dim)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", ["tree of prefixes", "many rows", "one prefill"])
def test_bfloat16(name: str, shape: str) -> None:
    rows, lengths = PLANS[shape]
    compare(ATTENTION.load(name), plan_of(rows, lengths, 1, seed=6), dtype=torch.bfloat16, tolerance=4e-2)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("seed", range(20))
def test_random_trees(name: str, seed: int) -> None:
    chance = random.Random(seed)
    lengths = [chance.choice([1, 2, 17, 63, 64, 130, 400]) for _ in range(8)]
    parent = [None] + [chance.choice([None, *range(n)]) for n in range(1, len(lengths))]

    def path(node: int | None) -> list[int]:
        return [] if node is None else [*path(parent[node]), node]

    rows = [
        (path(chance.choice([None, *range(len(lengths))])), chance.choice([1, 1, 1, 2, 9, 16, 17, 70]))
        for _ in range(chance.randint(1, 12))
    ]
    plan = plan_of(rows, lengths, chance.choice([0, 1, 3, 16]), seed)
    compare(ATTENTION.load(name), plan, windows=(None, chance.randint(1, 300)))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_row_without_finite_numbers_harms_no_other(name: str) -> None:
    plan = plan_of([([0, 1], 1), ([0, 2], 1), ([0], 4)], [80, 10, 12], 1, seed=8)
    kind = ATTENTION.load(name)
    attention = kind(FLOAT._replace(device=device_of(kind)), SLOTS, 4, (None,))
    attention.pool.kv.normal_()
    bad = next(segment for segment in plan.segments if segment.rows == (1,)).runs[0].start
    attention.pool.kv[bad, :, :2] = torch.nan
    out = attention.begin(plan)(0, torch.randn(6, 8, 16, device=device_of(kind)))
    assert torch.isfinite(out).all(-1).tolist() == [True, False, True, True, True, True]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("what", ["scale", "softcap", "sinks", "all"])
@pytest.mark.parametrize("shape", PLANS)
def test_scales_caps_and_sinks(name: str, what: str, shape: str) -> None:
    rows, lengths = PLANS[shape]
    sinks = tuple(torch.tensor([-2.0, 0.5, 1.0, 3.0]) * sign for sign in (1, -1))
    whole = {"scale": 0.7, "softcap": 2.0, "sinks": sinks}
    chosen = whole if what == "all" else {what: whole[what]}
    kind, plan = ATTENTION.load(name), plan_of(rows, lengths, 1, seed=4)
    compare(kind, plan, windows=(None, 50), scoring=Scoring(**chosen))


@pytest.mark.parametrize(
    "scoring", [Scoring(scale=0.7), Scoring(softcap=0.5), Scoring(sinks=(torch.ones(2),))]
)
def test_the_reference_follows_the_definition(scoring: Scoring) -> None:
    """One query of each head over three keys, by hand."""
    shape = KVShape(1, 1, 4, torch.float32, torch.device("cpu"))
    attention = Reference(shape, 8, 2, (None,), scoring)
    step = attention.begin(StepPlan((Row(1, (0,) * 3, 0, (Run(0, 3),), SamplingParams()),), ()))
    qkv = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(3))
    got = step(0, qkv)[-1].view(2, 4)
    for head in range(2):
        scores = qkv[:, 2] @ qkv[-1, head] * (scoring.scale or 0.5)
        if scoring.softcap:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        total = scores.exp().sum() + (math.e if scoring.sinks else 0.0)
        torch.testing.assert_close(got[head], (scores.exp() / total) @ qkv[:, 3])


@pytest.mark.parametrize("name", ["reference", *IMPLEMENTATIONS])
@pytest.mark.parametrize("seed", range(5))
def test_whole_tokens_are_stored_whatever_the_layout(name: str, seed: int) -> None:
    """The pool shows the numbers that attention wrote, token by token."""
    chance = random.Random(seed)
    windows = (None, 9)
    kind = ATTENTION.load(name)
    device = device_of(kind)
    attention = kind(FLOAT._replace(layers=2, device=device), 64, 4, windows)
    attention.pool.kv.fill_(0.0)
    slots = Run(chance.randrange(30), 20)
    step = attention.begin(StepPlan((Row(1, (0,) * 20, 0, (slots,), SamplingParams()),), ()))
    kept = torch.randn(2, 20, 4, 16, device=device)
    for layer in range(2):
        step(layer, torch.cat((torch.randn(20, 4, 16, device=device), kept[layer]), 1))
    right = torch.zeros(64, 2, 4, 16, device=device)
    right[slots.start : slots.start + 20] = kept.transpose(0, 1)
    assert torch.equal(attention.pool.kv, right)
    assert attention.pool.slots == 64
