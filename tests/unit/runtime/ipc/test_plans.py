"""Plans, masks and results survive the way to another process, whatever the rows ask for and however a
sequence's text changes; what stays the same is sent once."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from runtime.ipc.plans import (
    ANSWERS,
    ORDERS,
    Change,
    Done,
    Failure,
    Finish,
    Launch,
    MaskReader,
    MaskWriter,
    PlanReader,
    PlanWriter,
    Result,
    call,
)
from runtime.ipc.wire import Wire
from runtime.plan import (
    MediaSpan,
    Row,
    RowResult,
    Run,
    Sample,
    Segment,
    StepPlan,
    StepResult,
    TokenMask,
)
from runtime.protocol.errors import WireError
from runtime.protocol.sampling import SamplingParams

TO_RUNNER, FROM_RUNNER = Wire(ORDERS), Wire(ANSWERS)

PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.0, logit_bias={1: 2.5}, stop=("é",)),
    SamplingParams(seed=2**63 - 1, custom_logit_processor="x", custom_params={"a": [1, {"b": None}]}),
]


def draw_plan(dice: random.Random) -> StepPlan:
    def ids(most: int = 4, below: int = 200_000) -> tuple[int, ...]:
        return tuple(dice.randrange(below) for _ in range(dice.randint(0, most)))

    def runs() -> tuple[Run, ...]:
        return tuple(Run(dice.randrange(10**6), dice.randint(1, 99)) for _ in range(dice.randint(0, 3)))

    def row(seq: int) -> Row:
        # Few ids in prompt and output: some go on as before, others differ somewhere.
        return Row(
            seq, ids(), dice.randrange(10**6), runs(), dice.choice(PARAMS),
            dice.random() < 0.5, dice.choice([0, 7, (1 << 62) + 5]), tuple(zip(ids(), ids())),
            dice.randrange(9), ids(6, 3), ids(6, 3), dice.randrange(9), ids(),
            dice.choice(["none", "last", "all"]), dice.random() < 0.5, dice.randrange(99),
            dice.random() < 0.5, dice.randrange(4), dice.randrange(3),
            tuple(MediaSpan(*pair, 5, 6) for pair in zip(ids(), ids())),
        )  # fmt: skip

    rows = tuple(row(seq) for seq in dice.sample(range(1, 6), dice.randint(0, 5)))
    segments = tuple(Segment(runs(), ids(), dice.randrange(99)) for _ in range(dice.randint(0, 3)))
    return StepPlan(rows, segments, ids(2, 5))


def plain(plan: StepPlan) -> Any:
    """To compare: live sequences as tuples."""
    return (
        [
            tuple(
                tuple(value) if isinstance(value, list) else value for value in msgspec.structs.astuple(row)
            )
            for row in plan.rows
        ],
        plan.segments,
        plan.released,
    )


@pytest.mark.parametrize("seed", range(40))
def test_plans_arrive_as_they_are(seed: int) -> None:
    dice = random.Random(seed)
    writer, reader = PlanWriter(), PlanReader()
    for number in range(1, 7):
        plan = draw_plan(dice)
        order = TO_RUNNER.decode(TO_RUNNER.encode(writer.write(plan, at_once=True)))
        assert isinstance(order, Launch)
        assert (order.at_once, order.number) == (True, number)
        assert plain(reader.read(order)) == plain(plan)
        if dice.random() < 0.2:
            writer.forget(plan)


def test_what_stays_the_same_is_sent_once() -> None:
    writer, reader = PlanWriter(), PlanReader()
    output = list(range(1000))

    def send() -> Launch:
        row = Row(1, (5,), 0, (Run(0, 1),), PARAMS[1], prompt=list(range(5000)), output=output)
        order = writer.write(StepPlan((row,), ()), at_once=False)
        (got,) = reader.read(TO_RUNNER.decode(TO_RUNNER.encode(order))).rows  # type: ignore[arg-type]
        assert (list(got.prompt), list(got.output), got.sampling) == (list(range(5000)), output, PARAMS[1])
        return order

    assert len(TO_RUNNER.encode(send())) > 5000
    output += [7, 8]
    assert send().changes == (Change(1, None, None, (1000, [7, 8])),)
    del output[500:]
    output.append(3)
    assert send().changes == (Change(1, None, None, (500, [3])),)
    output.clear()
    assert send().changes == (Change(1, None, None, (0, [])),)
    assert len(TO_RUNNER.encode(send())) < 70


@pytest.mark.parametrize("seed", range(20))
def test_masks_arrive_and_stay_shared(seed: int) -> None:
    """(which array, its words, whether it lists its ids, whether its bits are wanted all the same) by row."""
    dice = random.Random(seed)
    asked = {
        dice.randrange(99): (
            dice.randrange(4),
            dice.randrange(3000),
            dice.random() < 0.5,
            dice.random() < 0.5,
        )
        for _ in range(dice.randrange(40))
    }
    asked |= {
        100: (1, 0, True, True),
        101: (1, 0, False, False),
        102: (2, 9, True, False),
        103: (2, 9, True, False),
    }
    arrays = {
        (key, words): (
            np.random.default_rng(key).integers(0, 2**32, words, dtype=np.uint32),
            np.arange(key, 32 * words, 7),
        )
        for key, words, _, _ in asked.values()
    }
    masks, whole = {}, set()
    for row, (key, words, listed, both) in asked.items():
        bits, ids = arrays[key, words]
        masks[row] = TokenMask(bits, ids if listed else None)
        if both:
            whole.add(row)
    writer = MaskWriter()
    with contextlib.closing(writer):
        reader = MaskReader(writer.file)
        places = writer.write(masks, whole)
        order = TO_RUNNER.decode(TO_RUNNER.encode(Finish(3, places, writer.size)))
        assert isinstance(order, Finish)
        got = reader.read(order)
        assert list(got) == list(masks)
        for row, mask in masks.items():
            if mask.allowed is None or row in whole:
                assert (got[row].bits == mask.bits).all()
            else:
                assert got[row].bits is None
            assert (got[row].allowed is None) == (mask.allowed is None)
            if mask.allowed is not None:
                assert got[row].allowed.tolist() == mask.allowed.tolist()
        lists = {
            id(mask.allowed): id(got[row].allowed) for row, mask in masks.items() if mask.allowed is not None
        }
        assert len(set(lists.values())) == len(lists)
        reader.tell_ended(3)
        assert writer.ended == 3


def test_masks_behind_drafts_arrive_with_their_row() -> None:
    arrays = [np.arange(5, dtype=np.uint32) + number for number in range(6)]
    ids = np.array([1, 2, 9], dtype=np.int64)
    behind = (TokenMask(arrays[1]), TokenMask(arrays[2], ids), TokenMask(arrays[0]))
    masks = {4: TokenMask(arrays[0], None, behind), 1: TokenMask(arrays[3]), 2: TokenMask(arrays[4], ids)}
    with contextlib.closing(MaskWriter()) as writer:
        places = writer.write(masks, {4})
        got = MaskReader(writer.file).read(Finish(1, places, writer.size))
        assert list(got) == [4, 1, 2]
        assert [one.bits.tolist() for one in (got[4], *got[4].behind)] == [
            arrays[number].tolist() for number in (0, 1, 2, 0)
        ]
        assert got[4].behind[1].allowed.tolist() == [1, 2, 9]
        assert got[1].behind == got[2].behind == ()


def test_answers_arrive_as_they_are() -> None:
    samples = (Sample(5, -0.1, ((1, 2.0),), (0.5,)), Sample(7))
    rows = (RowResult(error="no"), RowResult(samples, (float("-inf"),), hidden=((0.1, 2.0),)))
    for answer in (
        Result(9, StepResult(rows, 0.25)),
        Failure(-1, {"code": "x", "where": None}),
        Done({"file": "f"}),
    ):
        assert FROM_RUNNER.decode(FROM_RUNNER.encode(answer)) == answer
    with pytest.raises(WireError, match="Call"):
        FROM_RUNNER.decode(TO_RUNNER.encode(call("verify", SamplingParams(), None)))
