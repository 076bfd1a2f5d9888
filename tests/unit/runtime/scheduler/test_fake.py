"""The FakeRunner notices what it is there to notice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.plan import MediaSpan, Row, Run, Segment, StepPlan, TokenMask
from runtime.protocol.errors import InternalFault
from runtime.protocol.sampling import SamplingParams
from tests.unit.runtime.scheduler.fake import FakeRunner

PARAMS = SamplingParams()


def row(seq: int, tokens: tuple[int, ...], position: int, *slots: tuple[int, int], **more: Any) -> Row:
    return Row(seq, tokens, position, tuple(Run(*run) for run in slots), PARAMS, **more)


def seg(position: int, rows: tuple[int, ...], *runs: tuple[int, int]) -> Segment:
    return Segment(tuple(Run(*run) for run in runs), rows, position)


def run(runner: FakeRunner, rows: list[Row], segments: list[Segment], masks: Any = None) -> Any:
    runner.launch(StepPlan(tuple(rows), tuple(segments)))
    return runner.finish(masks or {}).rows


@pytest.fixture
def runner() -> FakeRunner:
    """Slots 0-3 hold 1 2 3 4 (sequence 1); 10-11 hold 5 6 (sequence 2)."""
    runner = FakeRunner(20, 50)
    run(runner, [row(1, (1, 2, 3, 4), 0, (0, 4)), row(2, (5, 6), 0, (10, 2))], [])
    return runner


def test_drafts_give_what_one_token_at_a_time_gives(runner: FakeRunner) -> None:
    prefix, token, right = seg(0, (0,), (0, 4)), 9, []
    for place in range(4):
        here = [seg(0, (0,), (0, 4)), seg(4, (0,), (4, place))][: 1 + bool(place)]
        (got,) = run(runner, [row(1, (token,), 4 + place, (4 + place, 1))], here)
        right += got.samples
        token = got.token
    drafts = [one.token for one in right[:3]]
    for good in range(4):
        guessed = (*drafts[:good], *(guess + 1 for guess in drafts[good:]))
        (got,) = run(runner, [row(5 + good, (9, *guessed), 4, (12, 4), drafts=3)], [prefix])
        assert got.samples == tuple(right[: good + 1])
    for wrong in ({"drafts": 1}, {"adapter": 2}, {"media": (MediaSpan(1, 0, 0, 1),)}):
        with pytest.raises(InternalFault):
            runner.launch(StepPlan((row(9, (9,), 4, (12, 1), **wrong),), (prefix,)))


def test_the_same_history_gives_the_same_however_it_is_held(runner: FakeRunner) -> None:
    whole = run(FakeRunner(9, 50), [row(7, (1, 2, 3, 4, 9), 0, (3, 5), scores=((0, 2), (3, 9)))], [])
    (parts,) = run(runner, [row(1, (9,), 4, (7, 1))], [seg(2, (0,), (2, 2)), seg(0, (0,), (0, 1), (1, 1))])
    assert parts.samples == whole[0].samples
    assert len(whole[0].scores) == 2


def test_masks_are_kept(runner: FakeRunner) -> None:
    bits = np.zeros(2, dtype=np.uint32)
    bits[1] = 1 << 5
    rows = [row(1, (9,), 4, (7, 1)), row(2, (9,), 2, (8, 1))]
    masks = {0: TokenMask(bits), 1: TokenMask(bits, np.array([37]))}
    assert [one.token for one in run(runner, rows, [seg(0, (0,), (0, 4)), seg(0, (1,), (10, 2))], masks)] == [
        37,
        37,
    ]


@pytest.mark.parametrize(
    ("rows", "segments", "word"),
    [
        ([row(1, (9,), 4, (7, 1))], [seg(0, (0,), (0, 3))], "cover 3 tokens"),
        ([row(1, (9,), 4, (7, 1))], [seg(0, (0,), (0, 4)), seg(3, (0,), (3, 1))], "does not continue"),
        ([row(1, (9,), 4, (7, 1))], [seg(0, (0,), (0, 2)), seg(2, (0,), (10, 2))], "does not continue"),
        ([row(1, (9,), 4, (7, 1))], [seg(0, (0,), (0, 2), (3, 1), (2, 1))], "mixes histories"),
        ([row(1, (9,), 4, (7, 1))], [seg(0, (0,), (0, 3), (15, 1))], "never written"),
        ([row(1, (9,), 4, (7, 1))], [seg(0, (0,), (0, 4)), seg(4, (0,))], "empty"),
        ([row(2, (9,), 2, (7, 1))], [seg(0, (0,), (0, 2))], "another history than it had"),
        ([row(1, (9,), 4, (3, 1))], [seg(0, (0,), (0, 4))], "slot 3"),
        ([row(1, (9,), 4, (20, 1))], [seg(0, (0,), (0, 4))], "slot 20"),
        ([row(1, (9,), 4, (7, 2))], [seg(0, (0,), (0, 4))], "2 slots for 1 tokens"),
        (
            [row(1, (9,), 4, (7, 1)), row(2, (9,), 2, (7, 1))],
            [seg(0, (0,), (0, 4)), seg(0, (1,), (10, 2))],
            "slot 7",
        ),
    ],
)
def test_a_wrong_plan_is_refused(runner: FakeRunner, rows: Any, segments: Any, word: str) -> None:
    with pytest.raises(InternalFault, match=word):
        run(runner, rows, segments)


def test_one_finish_for_each_launch(runner: FakeRunner) -> None:
    with pytest.raises(InternalFault, match="without launch"):
        runner.finish({})
    runner.launch(StepPlan((row(3, (1,), 0, (5, 1)),), ()))
    with pytest.raises(InternalFault, match="before finish"):
        runner.launch(StepPlan((), ()))
