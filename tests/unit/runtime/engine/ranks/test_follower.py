"""What a rank does about a pass that fails: it says so, and ends when the other ranks wait for it in vain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from runtime.config.runner import World
from runtime.engine.follower import Follower, OutOfStep
from runtime.ipc.address import Address
from runtime.ipc.mailbox import MailboxClosed
from runtime.ipc.plans import Done, Failure, MaskReader, MaskWriter, PlanWriter, Result, call
from runtime.plan import Row, RowResult, Run, Sample, StepPlan, StepResult, TokenMask
from runtime.protocol.errors import EngineDead, InternalFault
from runtime.protocol.sampling import SamplingParams

ONE = StepPlan((Row(1, (5,), 0, (Run(0, 1),), SamplingParams()),), ())


class Odd:
    """A runner whose verbs raise what they are told to, once."""

    slots, vocab_size = 8, 160

    def __init__(self, launch: Exception | None = None, finish: Exception | None = None) -> None:
        self._launch, self._finish = launch, finish

    def launch(self, plan: StepPlan) -> None:
        error, self._launch = self._launch, None
        if error is not None:
            raise error

    def finish(self, masks: Mapping[int, TokenMask]) -> StepResult:
        error, self._finish = self._finish, None
        if error is not None:
            raise error
        return StepResult((RowResult((Sample(3),)),))

    def done(self) -> bool:
        return True

    def verify(self, params: SamplingParams) -> None: ...
    def close(self) -> None: ...


class Counted:
    def __init__(self) -> None:
        self.starts = 0

    def start(self, folder: str | None, steps: int | None) -> dict[str, Any]:
        self.starts += 1
        return {"file": "x"}

    def stepped(self) -> None: ...


def served(runner: Odd, world: World, *, masks: MaskWriter | None = None) -> tuple[list[Any], bool]:
    """What it answers to a profile and two plans, and whether it ended before the orders did."""
    orders, answers = Address.memory(), Address.memory()
    writer, memory = PlanWriter(), masks or MaskWriter()
    orders.outbox().send(call("start_profile", None, None))
    for _ in range(2):
        orders.outbox().send(writer.write(ONE, at_once=True))
    orders.inbox().close()
    follower = Follower(orders.inbox(), answers.outbox(), MaskReader(memory.file), runner, Counted(), world)
    try:
        with pytest.raises((MailboxClosed, OutOfStep)) as ended:
            follower.serve()
    finally:
        if masks is None:
            memory.close()
    return answers.inbox().receive(0), ended.type is OutOfStep


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("runner", "ends"),
    [
        (lambda: Odd(launch=InternalFault("the plan is not whole")), False),  # all ranks refuse it
        (lambda: Odd(launch=RuntimeError("no memory")), True),
        (lambda: Odd(finish=InternalFault("the forward pass failed")), True),
        (lambda: Odd(finish=EngineDead("rank 0 lost the others")), False),  # another one is to blame
    ],
)
def test_a_rank_that_failed_alone_says_why_and_ends(runner: Any, ends: bool, rank: int) -> None:
    answers, ended = served(runner(), World(rank, 2))
    assert ended == ends
    profile, failed, *rest = answers
    assert isinstance(profile, Done)
    assert isinstance(failed, Failure)
    assert [type(one) for one in rest] == ([] if ends else [Result])


def test_one_without_others_goes_on() -> None:
    answers, ended = served(Odd(finish=RuntimeError("once")), World())
    assert not ended
    assert [type(one) for one in answers] == [Done, Failure, Result]


def test_rank_0_alone_makes_profiles_and_says_that_a_pass_has_ended() -> None:
    for rank in (0, 1):
        masks = MaskWriter()
        (profile, *_), _ = served(Odd(), World(rank, 2), masks=masks)
        assert profile == Done({"file": "x"} if rank == 0 else {})
        assert masks.ended == (2 if rank == 0 else 0)
        masks.close()
