"""A runner's failures stay with the requests of the plan."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.plan import RowResult, Sample, StepResult


class Broken:
    """Passes on to the real runner, save where `how` says."""

    def __init__(self, runner: Any, how: str, at: int) -> None:
        self.runner, self.how, self.at = runner, how, at

    def launch(self, plan: Any) -> None:
        self.plan = plan
        self.at -= 1
        if self.how == "launch" and self.at == 0:
            raise MemoryError("no memory for the step")
        self.runner.launch(plan)

    def done(self) -> bool:
        return bool(self.runner.done())

    def finish(self, masks: Any) -> StepResult:
        result = self.runner.finish(masks)
        if self.at:
            return result
        match self.how:
            case "finish":
                raise RuntimeError("device lost")
            case "short":
                return StepResult(result.rows[:-1])
            case "row":
                return StepResult((RowResult(error="logits are not finite"), *result.rows[1:]))
            case "no token":
                return StepResult((RowResult(), *result.rows[1:]))
            case "foreign token":
                return StepResult((RowResult((Sample(10_000),)), *result.rows[1:]))
        return result


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize(
    ("how", "failed", "word"),
    [
        ("launch", 4, "MemoryError: no memory for the step"),
        ("finish", 4, "RuntimeError: device lost"),
        ("short", 4, "3 results for 4 rows"),
        ("row", 1, "not finite"),
        ("no token", 1, "lacks what its row asked for"),
        ("foreign token", 1, "not in the vocabulary"),
    ],
)
@pytest.mark.parametrize("page", [1, 4])
def test_errors_are_contained(bench: Any, how: str, failed: int, word: str, at: int, page: int) -> None:
    sim = bench(400, page_size=page, max_running_requests=4)
    sim.runner = Broken(sim.runner, how, at)
    for number in range(6):
        sim.add(str(number), [5, 6, number], max_new_tokens=8, ignore_eos=True)
    sim.run()
    answers = [sim.answer(str(number)) for number in range(6)]
    errors = [answer.finish.error for answer in answers if answer.finish.error]
    assert len(errors) == failed
    for error in errors:
        assert error["code"] == "internal_fault"
        assert word in error["message"]
    assert all(len(answer.new_ids) == 8 for answer in answers if answer.finish.type == "length")
    assert sim.scheduler.state()["failed"] == failed
    sim.empty()


def test_what_was_not_finite_is_not_cached(bench: Any) -> None:
    sim = bench(400)
    sim.runner = Broken(sim.runner, "row", 1)
    sim.add("a", [1, 2, 3, 4], max_new_tokens=4)
    sim.run()
    sim.add("b", [1, 2, 3, 4], max_new_tokens=1)
    assert sim.run().answer("b").cached_tokens == 0


def test_what_led_to_it_is_not_cached_either(bench: Any) -> None:
    """A row that is not finite may come from KV written before: only the prompt, published then, is left."""
    sim = bench(400)
    sim.runner = Broken(sim.runner, "row", 4)
    sim.add("a", [1, 2, 3, 4], max_new_tokens=9, ignore_eos=True, stream=True)
    ids = sim.run().answer("a").new_ids
    assert len(ids) == 3
    sim.add("b", [1, 2, 3, 4, *ids], max_new_tokens=1)
    assert sim.run().answer("b").cached_tokens == 4


def test_a_program_that_is_stopped_stops(bench: Any) -> None:
    """Only errors are answered: an interrupt goes up."""
    sim = bench(400)
    sim.add("a", [1], max_new_tokens=4)

    def interrupt(plan: Any) -> None:
        raise KeyboardInterrupt

    sim.runner.launch = interrupt
    with pytest.raises(KeyboardInterrupt):
        sim.tick()
