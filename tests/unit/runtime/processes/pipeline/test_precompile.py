"""Constraints compiled ahead: answered when all are done, or when the time is up."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest

from runtime.grammar.byte_matcher import BYTES
from runtime.grammar.manager import GrammarManager
from runtime.processes.pipeline.deferred_verbs import Precompiles
from runtime.protocol.constraint import Constraint
from runtime.protocol.control import MAX_PRECOMPILED, PrecompileReq
from runtime.protocol.errors import BadRequest, UnsupportedConstraint


def regex(*specs: str) -> list[Constraint]:
    return [Constraint("regex", spec) for spec in specs]


def test_all_are_told_in_order_with_their_errors():
    manager = GrammarManager(BYTES)
    try:
        asked = Precompiles(manager)
        asked.add(PrecompileReq(constraints=regex("a+", "(", "b")), 0.0)
        until = time.monotonic() + 60
        while not (told := list(asked.due(1.0))):
            assert time.monotonic() < until
            time.sleep(0.001)
        ((request, data),) = told
        assert not asked
        good, bad, other = data["constraints"]
        assert (good["ok"], good["backend"], good["exact"]) == (True, "outlines", True)
        assert good["compile_s"] > 0
        assert (bad["ok"], bad["error"]["code"]) == (False, "bad_constraint")
        assert other["ok"]
        assert len(request.constraints) == 3
        asked.add(PrecompileReq(constraints=regex("a+")), 2.0)
        ((_, data),) = list(asked.due(2.0))
        assert data["constraints"][0]["cached"]
    finally:
        manager.close()


class Never:
    def submit(self, constraint: Constraint) -> Future:
        return Future()


def test_what_is_late_is_told_and_goes_on():
    asked = Precompiles(Never())
    asked.add(PrecompileReq(constraints=regex("a"), timeout_s=5.0), 10.0)
    assert list(asked.due(14.9)) == []
    ((_, data),) = list(asked.due(15.0))
    assert data["constraints"][0]["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"constraints": regex("a") * (MAX_PRECOMPILED + 1)}, "constraints"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
    ],
)
def test_nonsense_is_refused(fields, where):
    with pytest.raises(BadRequest) as caught:
        Precompiles(Never()).add(PrecompileReq(**fields), 0.0)
    assert caught.value.where == where


def test_without_grammars():
    with pytest.raises(UnsupportedConstraint):
        Precompiles(None).add(PrecompileReq(), 0.0)
