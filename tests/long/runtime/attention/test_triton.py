"""The kernels' attention gives what the reference gives, in Triton's interpreter where there is no GPU: small
plans, fewer than those of the contract, which a GPU runs whole (tests/long/contracts/test_attention.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

pytest.importorskip("triton")

from runtime.attention.base import PLAIN, Scoring, choose
from runtime.attention.pool import KVShape
from runtime.attention.reference import Reference
from runtime.attention.tiles import cut, tables_of
from runtime.attention.triton_tiles import TritonTiles
from runtime.kernels.device import INTERPRETED
from runtime.kernels.paged_attention import Form, States, Tiles, attend_tiles, plain_attend_tiles
from runtime.plan import StepPlan
from runtime.protocol.errors import ModelLoadError
from tests.long.contracts.test_attention import SLOTS, compare, device_of, plan_of

# The interpreter computes with numpy, which warns of infinity and NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DEVICE = device_of(TritonTiles)

# As in the contract: (rows, lengths of the segments)
PLANS: dict[str, tuple[list[tuple[list[int], int]], list[int]]] = {
    "first tokens": ([([], 1), ([], 5)], []),
    "prefill": ([([], 70)], []),
    "decodes": ([([0], 1), ([1], 1), ([2], 1)], [5, 70, 140]),
    "long decode": ([([0], 1)], [300]),
    "chunk": ([([0], 20)], [40]),
    "shared prefix": ([([0, 1], 1), ([0, 2], 1), ([0], 3), ([0, 3], 1)], [80, 3, 9, 20]),
    "tree": ([([0, 1, 3], 1), ([0, 1, 4], 2), ([0, 2], 1), ([0], 12), ([], 4)], [30, 25, 40, 5, 6]),
    "own before shared": ([([0, 2], 1), ([1, 2], 1)], [8, 8, 20]),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("shape", "page"), [(name, index % 3 * 8) for index, name in enumerate(PLANS)])
def test_equals_the_reference(shape: str, page: int) -> None:
    compare(TritonTiles, plan_of(*PLANS[shape], page, seed=page))


@pytest.mark.parametrize(
    ("shape", "window"), [("decodes", 7), ("prefill", 20), ("tree", 33), ("shared prefix", 1)]
)
def test_windows(shape: str, window: int) -> None:
    compare(TritonTiles, plan_of(*PLANS[shape], 1, seed=3), windows=(window, None))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 8), (3, 3, 32), (6, 2, 20), (20, 1, 16), (19, 1, 260)]
)
def test_head_shapes(heads: int, kv_heads: int, dim: int) -> None:
    plan = plan_of(*PLANS["tree"], 1, seed=5)
    compare(TritonTiles, plan, heads=heads, kv_heads=kv_heads, dim=dim)


@pytest.mark.parametrize("shape", ["chunk", "shared prefix"])
@pytest.mark.parametrize(
    "scoring",
    [Scoring(0.3, softcap=2.0), Scoring(sinks=(torch.tensor([0.5, -1.0, 2.0, 0.0]),))],
    ids=["capped", "sinks"],
)
def test_scoring(shape: str, scoring: Scoring) -> None:
    compare(TritonTiles, plan_of(*PLANS[shape], 1, seed=2), scoring=scoring)


def test_numbers_across_memory_and_bfloat16() -> None:
    plan = plan_of(*PLANS["tree"], 1, seed=6)
    compare(TritonTiles, plan, across=True)
    compare(TritonTiles, plan, dtype=torch.bfloat16, tolerance=4e-2)


@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_pools_of_fewer_bits(kept: torch.dtype) -> None:
    compare(TritonTiles, plan_of(*PLANS["shared prefix"], 4, seed=9), kept=kept)


def fixed_equals_the_reference(plans: Sequence[StepPlan], scoring: Scoring = PLAIN) -> None:
    """One step with tables at a fixed place, for one plan after the other; with rows to spare."""
    windows = (None, 9)
    shape = KVShape(2, 2, 16, torch.float32, DEVICE)
    tested, right = (kind(shape, SLOTS, 4, windows, scoring) for kind in (TritonTiles, Reference))
    right.pool.kv.normal_()
    tested.pool.kv.copy_(right.pool.kv)
    fixed = tested.fixed(8)
    assert fixed is not None
    step = fixed.step
    for plan in plans:
        count = plan.token_count
        assert fixed.load(plan)
        reference = right.begin(plan)
        for layer in range(2):
            qkv = torch.randn(8, 8, 16, device=DEVICE)
            got = step(layer, qkv)[:count]
            torch.testing.assert_close(got, reference(layer, qkv[:count]), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(tested.pool.kv, right.pool.kv)


def test_tables_at_a_fixed_place() -> None:
    decodes, shared = (
        plan_of(*PLANS["decodes"], 1, seed=1),
        plan_of([([0, 1], 1), ([0, 2], 1), ([0], 1), ([0, 3], 1), ([], 1)], [80, 3, 9, 20], 1, seed=2),
    )
    fixed_equals_the_reference([shared, decodes, shared])


def test_a_plan_that_does_not_fit_is_refused() -> None:
    attention = TritonTiles(KVShape(1, 2, 16, torch.float32, DEVICE), SLOTS, 4, (None,))
    fixed = attention.fixed(2)
    assert fixed is not None
    assert not fixed.load(plan_of(*PLANS["decodes"], 1, seed=1))
    assert fixed.load(plan_of(*PLANS["long decode"], 1, seed=1))


def test_the_kernel_equals_its_twin() -> None:
    plan = plan_of(*PLANS["tree"], 1, seed=4)
    tables = tables_of(plan, 8, 32)
    made = cut(tables, 21, 4)
    assert (made.narrow[:, 5] < 0).any() or (made.wide[:, 5] < 0).any()
    assert len(made.of)
    queries, positions = (
        torch.tensor(one, dtype=torch.int32, device=DEVICE) for one in (tables.queries, tables.positions)
    )
    slots = torch.randperm(tables.keys, device=DEVICE).int()
    qkv = torch.randn(plan.token_count, 8, 16, device=DEVICE)
    pool = torch.randn(tables.keys, 4, 16, device=DEVICE)
    form = Form(0.25, 3.0, 21, torch.randn(4, device=DEVICE))
    results = []
    for attend in (attend_tiles, plain_attend_tiles):
        out, states = (
            torch.zeros(plan.token_count, 4, 16, device=DEVICE),
            States.empty(len(made.of), 4, 16, DEVICE),
        )
        for fields, rows in ((made.narrow, 16), (made.wide, 64)):
            there = torch.tensor(fields, dtype=torch.int32, device=DEVICE)
            if len(there):
                attend(qkv, pool, Tiles(there, queries, positions, slots), form, out, states, rows)
        results.append((out, *states))
    for got, right in zip(*results):
        torch.testing.assert_close(got, right, atol=2e-5, rtol=2e-5)


def test_the_tables_name_each_key_once() -> None:
    plan = plan_of(*PLANS["tree"], 1, seed=4)
    tables = tables_of(plan, 8, 32)
    named = sum(segment.length for segment in plan.segments) + plan.token_count
    assert tables.keys == named
    for window in (None, 5):
        made = cut(tables, window, 4)
        seen = sum((fields[:, 1] * fields[:, 3]).sum() for fields in (made.narrow, made.wide))
        alone = sum(((row.position + 1) * len(row.tokens)) for row in plan.rows)
        assert seen < alone * 3 if window is None else seen < alone


def test_it_is_refused_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert INTERPRETED or torch.cuda.is_available()
    monkeypatch.setattr("runtime.attention.base.INTERPRETED", False)
    with pytest.raises(ModelLoadError, match="needs a CUDA device"):
        choose("triton", cpu)
    assert choose("auto", cpu) is not TritonTiles
    monkeypatch.setattr("runtime.attention.base.INTERPRETED", True)
    assert choose("triton", cpu) is TritonTiles


@pytest.mark.parametrize("fixed", [False, True])
def test_tables_begin_where_no_kernel_is_compiled_anew(fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At multiples of 16 bytes, however long those before are."""
    places: list[int] = []

    def attend(qkv: torch.Tensor, pool: torch.Tensor, tiles: Tiles, *others: object) -> None:
        places.extend(table.data_ptr() % 16 for table in tiles)

    def merge(states: States, of: torch.Tensor, ends: torch.Tensor, *others: object) -> None:
        places.extend(table.data_ptr() % 16 for table in (of, ends))

    def store(kv: torch.Tensor, pool: torch.Tensor, slots: torch.Tensor, at: torch.Tensor) -> None:
        places.append(at.data_ptr() % 16)

    for name, kernel in (("attend_tiles", attend), ("merge_states", merge), ("store_kv", store)):
        monkeypatch.setattr(f"runtime.attention.triton_tiles.{name}", kernel)
    attention = TritonTiles(KVShape(1, 2, 16, torch.float32, DEVICE), SLOTS, 4, (None,))
    for rows in range(1, 6):
        lengths = [([number], 1) for number in range(rows)]
        plan = plan_of(lengths, [130 + number for number in range(rows)], 1, seed=rows)
        if fixed:
            made = attention.fixed(rows)
            assert made is not None
            assert made.load(plan)
            step = made.step
        else:
            step = attention.begin(plan)
        step(0, torch.zeros(rows, 8, 16, device=DEVICE))
    assert places
    assert not any(places)
