"""Constraints compiled ahead: answered when all are done, or when the time is up."""

from __future__ import annotations

import time
from concurrent.futures import Future
from typing import Any

import pytest

from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.manager import GrammarManager
from runtime.processes.pipeline.verbs import Verbs
from runtime.protocol.constraint import Constraint
from runtime.protocol.control import MAX_PRECOMPILED, ControlOutput, PrecompileReq


def regex(*specs: str) -> list[Constraint]:
    return [Constraint("regex", spec) for spec in specs]


class Asked:
    """The verbs of a scheduler's process without a scheduler, at a clock that is set by hand."""

    def __init__(self, grammars: Any) -> None:
        self.now = 0.0
        self.answers: list[ControlOutput] = []
        nothing: Any = None
        self.verbs = Verbs(nothing, nothing, grammars, self.answers.append, lambda: self.now, ())

    def ask(self, now: float = 0.0, **fields: Any) -> None:
        self.now = now
        self.verbs.take(PrecompileReq(**fields))

    def due(self, now: float) -> list[ControlOutput]:
        """The answers that are new at this time."""
        self.now, before = now, len(self.answers)
        self.verbs.answer_due(False)
        return self.answers[before:]


def test_all_are_told_in_order_with_their_errors():
    manager = GrammarManager(BYTES)
    try:
        asked = Asked(manager)
        asked.ask(constraints=regex("a+", "(", "b"))
        until = time.monotonic() + 60
        while not (told := asked.due(1.0)):
            assert time.monotonic() < until
            time.sleep(0.001)
        (answer,) = told
        assert not asked.verbs.waiting
        good, bad, other = answer.data["constraints"]
        assert (good["ok"], good["backend"], good["exact"]) == (True, "outlines", True)
        assert good["compile_s"] > 0
        assert (bad["ok"], bad["error"]["code"]) == (False, "bad_constraint")
        assert other["ok"]
        asked.ask(2.0, constraints=regex("a+"))
        (answer,) = asked.due(2.0)
        assert answer.data["constraints"][0]["cached"]
    finally:
        manager.close()


class Never:
    def submit(self, constraint: Constraint) -> Future:
        return Future()


def test_what_is_late_is_told_and_goes_on():
    asked = Asked(Never())
    asked.ask(10.0, constraints=regex("a"), timeout_s=5.0)
    assert asked.due(14.9) == []
    (answer,) = asked.due(15.0)
    assert answer.data["constraints"][0]["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"constraints": regex("a") * (MAX_PRECOMPILED + 1)}, "constraints"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
    ],
)
def test_nonsense_is_refused(fields, where):
    asked = Asked(Never())
    asked.ask(**fields)
    assert (asked.answers[0].data["code"], asked.answers[0].data["where"]) == ("bad_request", where)


def test_without_grammars():
    asked = Asked(None)
    asked.ask()
    assert asked.answers[0].data["code"] == "unsupported_constraint"
