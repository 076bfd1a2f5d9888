"""The layout reads shared runs once, copies no context, and keeps to the window."""

from __future__ import annotations

import pytest
import torch

from runtime.attention.base import ATTENTION, choose
from runtime.attention.layout import Band, Full, Member, Span, cut_runs, join, split
from runtime.attention.pool import HeadMajorPool, KVShape, PageMajorPool, slots_of
from runtime.plan import Row, Run, Segment, StepPlan
from runtime.protocol.registry import UnknownName
from runtime.protocol.sampling import SamplingParams

CPU = torch.device("cpu")


def row(position: int, new: int, start: int) -> Row:
    return Row(start, (0,) * new, position, (Run(start, new),), SamplingParams())


def test_a_prefix_of_64_rows_is_one_piece_and_their_tails_another() -> None:
    rows = tuple(row(1005, 1, 2000 + 20 * n + 5) for n in range(64))
    tails = [Segment((Run(2000 + 20 * n, 5),), (n,), 1000) for n in range(64)]
    plan = StepPlan(rows, (Segment((Run(0, 1000),), tuple(range(64)), 0), *tails))
    bands, members, shared = split(plan, None)
    assert not bands
    assert members == [Member(Span(n, 1), (Run(2000 + 20 * n, 6),), 5) for n in range(64)]
    assert shared == [Full(tuple(Span(n, 1) for n in range(64)), (Run(0, 1000),))]
    views = choose("torch_views", CPU)(KVShape(1, 1, 8, torch.float32, CPU), 4096, 1, (None,))
    bundle, full = views._parts(plan, None)  # type: ignore[attr-defined]
    assert (bundle.queries, bundle.batch, len(bundle.keys)) == (slice(0, 64), 64, 64 * 6)
    assert (full.queries, full.batch, full.keys) == (slice(0, 64), 1, slice(0, 1000))


def test_neighbouring_segments_of_the_same_rows_become_one_run() -> None:
    plan = StepPlan(
        (row(300, 1, 300), row(290, 1, 400)),
        (
            Segment((Run(100, 50), Run(150, 40)), (0, 1), 0),
            Segment((Run(190, 100),), (0, 1), 90),
            Segment((Run(90, 100),), (1,), 190),
            Segment((Run(0, 110),), (0,), 190),
        ),
    )
    _, members, shared = split(plan, None)
    assert shared == [Full((Span(0, 1), Span(1, 1)), (Run(100, 190),))]
    assert members == [
        Member(Span(0, 1), (Run(0, 110), Run(300, 1)), 110),
        Member(Span(1, 1), (Run(90, 100), Run(400, 1)), 100),
    ]


def test_long_contexts_stay_views() -> None:
    plan = StepPlan(
        (row(900, 1, 900), row(500, 40, 2000)),
        (Segment((Run(0, 900),), (0,), 0), Segment((Run(1000, 500),), (1,), 0)),
    )
    views = choose("auto", CPU)(KVShape(1, 1, 8, torch.float32, CPU), 4096, 1, (None,))
    parts = views._parts(plan, None)  # type: ignore[attr-defined]
    assert [(part.queries, part.keys) for part in parts] == [
        (slice(0, 1), slice(0, 901)),
        (slice(1, 41), slice(1000, 1500)),
        (slice(1, 41), None),
    ]


def test_windows_cut_what_is_out_of_sight() -> None:
    plan = StepPlan(
        (row(300, 1, 1000), row(450, 1, 1001)),
        (Segment((Run(0, 300),), (0, 1), 0), Segment((Run(500, 150),), (1,), 300)),
    )
    assert split(plan, 200).members == [
        Member(Span(0, 1), (Run(101, 199), Run(1000, 1)), 199),
        Member(Span(1, 1), (Run(251, 49), Run(500, 150), Run(1001, 1)), 199),
    ]
    assert split(plan, 100).members == [
        Member(Span(0, 1), (Run(201, 99), Run(1000, 1)), 99),
        Member(Span(1, 1), (Run(551, 99), Run(1001, 1)), 99),
    ]
    prefill = StepPlan((row(10, 300, 100),), (Segment((Run(0, 10),), (0,), 0),))
    assert split(prefill, 64).bands == [
        Band(Span(0, 256), (Run(0, 10), Run(100, 256)), 10, 64),
        Band(Span(256, 44), (Run(100 + 193, 107),), 63, 64),
    ]


def test_runs() -> None:
    runs = (Run(5, 2), Run(7, 3), Run(0, 0), Run(20, 4))
    assert join(runs) == (Run(5, 5), Run(20, 4))
    assert join(()) == ()
    assert cut_runs(runs, 1, 7) == (Run(6, 1), Run(7, 3), Run(20, 2))
    assert cut_runs(runs, 3, 3) == ()
    assert slots_of(runs, CPU).tolist() == [5, 6, 7, 8, 9, 20, 21, 22, 23]


def test_choose() -> None:
    assert choose("auto", CPU) is ATTENTION.load("native")
    assert choose("reference", CPU).__name__ == "Reference"
    with pytest.raises(UnknownName, match="torch_views"):
        choose("warp", CPU)
    with pytest.raises(ValueError, match="multiple"):
        choose("auto", CPU)(KVShape(1, 2, 8, torch.float32, CPU), 4, 3, (None,))


@pytest.mark.parametrize("page", [1, 16, 64])
def test_what_lies_side_by_side_in_a_pool(page: int) -> None:
    """For products on the CPU a head's tokens, for transfers a page of all layers."""
    shape = KVShape(3, 2, 8, torch.float32, CPU)
    head, whole = HeadMajorPool(shape, 128).kv, PageMajorPool(shape, 128).kv
    assert head.shape == whole.shape == (128, 3, 4, 8)
    for pool in (head, whole):
        assert not pool.any(), "unwritten slots hold what lay in memory"
    whole.copy_(torch.randn(whole.shape))
    assert head[page : 2 * page, 1, 3].is_contiguous()
    assert whole[page : 2 * page].is_contiguous()
    with_pages = whole.view(128 // page, page, 3, 4, 8)
    assert torch.equal(with_pages[1, :, 2], whole[page : 2 * page, 2])
