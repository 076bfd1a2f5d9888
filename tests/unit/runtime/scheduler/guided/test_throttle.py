"""Throttle: free requests come as far beside constrained ones as beside free ones, where that can be had."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.plan import StepPlan, StepResult
from runtime.protocol.constraint import Constraint
from runtime.scheduler.guided.throttle import LEAST, Pass, Throttle


def result(hidden_s: float, seconds: float) -> StepResult:
    return StepResult((), seconds, hidden_s)


def plain(rows: int, present: int) -> Pass:
    return Pass(rows, present, 0, computes=False, jumps=False)


class Machine:
    """A pass of n rows takes base + each * n seconds, and `cost` for each constrained row among them."""

    def __init__(self, base: float, each: float, cost: float, seed: int = 0) -> None:
        self.base, self.each, self.cost = base, each, cost
        self.throttle, self.now, self.dice = Throttle(), 0.0, random.Random(seed)

    def usual(self, rows: int) -> float:
        return self.base + self.each * rows

    def step(self, free: int, bound: int) -> float:
        """One pass; seconds."""
        out = bool(free and bound) and self.throttle.skip()
        rows = free + (0 if out else bound)
        noise = 1 + 0.1 * self.dice.random()
        whole = self.usual(rows) * noise
        took = whole + (rows - free) * self.cost
        self.now += took
        what = Pass(rows, free + bound, rows - free, computes=False, jumps=False)
        self.throttle.observe(what, result(0.8 * whole, 0.95 * whole), self.now, beside=bool(free and bound))
        return took


@given(
    base=st.floats(1.0, 20.0),
    each=st.floats(0.02, 1.0),
    cost=st.floats(0.0, 2.0),
    free=st.integers(2, 30),
    bound=st.integers(2, 30),
    seed=st.integers(0, 99),
)
def test_free_ones_keep_their_throttle_where_sitting_out_can_give_it(
    base: float, each: float, cost: float, free: int, bound: int, seed: int
) -> None:
    machine = Machine(base / 1000, each / 1000, cost / 1000, seed)
    for rows in [*range(1, free + bound), *[free + bound] * 20]:
        machine.step(rows, 0)
    took = [machine.step(free, bound) for _ in range(400)]
    fair = machine.usual(free + bound) * 1.05  # the noise is 5 % in the mean
    least = (machine.usual(free) * 1.05 * (LEAST - 1) + fair + bound * machine.cost) / LEAST
    assert sum(took) / len(took) <= max(fair, least) * 1.12


def test_nobody_sits_out_where_constraints_cost_nothing() -> None:
    machine = Machine(0.005, 0.0002, 0.0)
    for rows in range(1, 60):
        machine.step(rows, 0)
    for _ in range(200):
        machine.step(20, 20)
    assert not machine.throttle.skip()


def test_constrained_ones_are_in_one_of_so_many_passes_whatever_they_owe() -> None:
    throttle = Throttle()
    throttle.deficit = 1e9
    outs = [throttle.skip() for _ in range(40)]
    assert outs == ([True] * (LEAST - 1) + [False]) * 10


def test_a_pass_is_sat_out_now_and_then_until_one_without_masks_was_seen() -> None:
    throttle, now, outs = Throttle(), 0.0, []
    for _ in range(48):
        outs.append(throttle.skip())
        now += 0.02
        throttle.observe(Pass(40, 40, 20, computes=False, jumps=False), result(0.008, 0.01), now, beside=True)
    assert throttle.deficit == 0
    assert sum(outs) == 6
    throttle.observe(plain(20, 40), result(0.004, 0.005), now + 0.006, beside=True)
    throttle.observe(plain(20, 40), result(0.004, 0.005), now + 0.012, beside=True)
    throttle.observe(
        Pass(40, 40, 20, computes=False, jumps=False), result(0.008, 0.01), now + 0.032, beside=True
    )
    assert throttle.deficit > 0
    assert throttle.skip()


def learned() -> tuple[Throttle, float]:
    throttle, now = Throttle(), 0.0
    for rows in range(1, 60):
        now += 0.001 * rows
        throttle.observe(plain(rows, rows), result(0.0007 * rows, 0.0009 * rows), now, beside=False)
    return throttle, now


def test_a_break_of_the_machine_is_nobodys_fault() -> None:
    throttle, now = learned()
    throttle.observe(
        Pass(40, 40, 20, computes=False, jumps=False), result(0.028, 0.036), now + 3.0, beside=True
    )
    assert 0 < throttle.deficit < 0.2


@pytest.mark.parametrize("case", ["a prompt", "nothing ran", "not measured"])
def test_time_that_is_not_counted(case: str) -> None:
    throttle, now = learned()
    if case == "nothing ran":
        throttle.idle()
    seconds = 0.0 if case == "not measured" else 0.028
    what = Pass(40, 40, 20, computes=case == "a prompt", jumps=False)
    throttle.observe(what, result(seconds, seconds), now + 0.5, beside=True)
    assert throttle.deficit == 0


def test_deficits_end_with_the_free_requests() -> None:
    throttle, now = learned()
    throttle.observe(
        Pass(40, 40, 20, computes=False, jumps=False), result(0.028, 0.036), now + 0.08, beside=True
    )
    assert throttle.deficit > 0
    throttle.observe(
        Pass(20, 20, 20, computes=False, jumps=False), result(0.014, 0.018), now + 0.1, beside=False
    )
    assert throttle.deficit == 0


@pytest.mark.parametrize("slow", [0.0, 0.02])
def test_in_the_scheduler(make_bench: Any, toy_grammars: Any, slow: float) -> None:
    """Where passes with masks take thrice as long, constrained requests are in some of them only; free ones
    are in all."""
    now, seen = 0.0, []

    def takes(plan: StepPlan) -> tuple[float, float]:
        nonlocal now
        hidden = 1e-3 * (2 + 0.2 * len(plan.rows))
        now += 1.1 * hidden + 5e-4 + slow * any(row.masked for row in plan.rows)
        seen.append(sum(row.masked for row in plan.rows))
        return hidden, 1.1 * hidden

    sim = make_bench(20000, grammar=toy_grammars(), overlap=True, clock=lambda: now)
    sim.runner.takes = takes
    for number in range(12):
        sim.add(f"free {number}", [number, 2], max_new_tokens=600, ignore_eos=True)
        sim.tick()
    for number in range(8):
        regex = Constraint("regex", "|".join(("yes no " * 30, "no yes " * 30)))
        sim.add(f"bound {number}", [number, 3], constraint=regex, max_new_tokens=240, jump_forward=False)
    seen.clear()
    while any(f"bound {number}" not in sim.news for number in range(8)):
        sim.tick()
    first, last = seen.index(8), len(seen) - seen[::-1].index(8)
    out = seen[first:last].count(0)
    assert out > 5 if slow else out < 3
    sim.run()
    assert {sim.text(f"bound {number}") for number in range(8)} <= {b"yes no " * 30, b"no yes " * 30}
    assert all(len(sim.answer(f"free {number}").new_ids) == 600 for number in range(12))
    sim.empty()
