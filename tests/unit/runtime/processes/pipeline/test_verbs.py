"""The table of control verbs: every row has its method, every name its request, every route its rule."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.engine.follower import Follower
from runtime.engine.runner import TorchRunner
from runtime.ipc import plans
from runtime.ipc.address import Address
from runtime.ipc.mailbox import MailboxClosed
from runtime.ipc.plans import CALLS, Done, Failure, MaskReader, MaskWriter, arguments_of, call
from runtime.ipc.wire import WIRE_TYPES
from runtime.processes.pipeline import verbs
from runtime.processes.pipeline.verbs import Verbs
from runtime.protocol.control import VERBS, ControlOutput, PauseReq, ResumeMemoryReq, Verb, request_of
from runtime.protocol.errors import BadRequest, WireError
from runtime.protocol.request_base import SingleReq
from runtime.server.native import control
from runtime.server.native.verbs import ORDERS
from tests.unit.runtime.scheduler.fake import FakeRunner

OWN = {"verify", "start_profile", "stop_profile"}
"""Calls that the follower itself carries out."""


class TouchReq(SingleReq):
    times: int = 1


TOUCH = Verb("touch", TouchReq, by="runner")


class Touched(FakeRunner):
    def touch(self, request: TouchReq) -> dict[str, Any]:
        return {"touched": request.times}


def test_every_row_has_a_method_and_travels() -> None:
    for verb in VERBS.values():
        owner = Verbs if verb.by == "scheduler" else TorchRunner
        assert callable(getattr(owner, verb.name))
        assert verb.request in WIRE_TYPES
    for name in CALLS.keys() - OWN:
        assert callable(getattr(TorchRunner, name))


def test_requests_by_name() -> None:
    made = request_of("pause", {"mode": "retract"})
    assert isinstance(made, PauseReq)
    assert made.mode == "retract"
    made = request_of("resume_memory_occupation", {"parts": ["weights"]})
    assert isinstance(made, ResumeMemoryReq)
    assert made.parts == ("weights",)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("nonsense", {}, "unknown verb 'nonsense'"),
        ("pause", {"modus": 1}, "unknown parameter 'modus'"),
        ("pause", {"rid": "x"}, "unknown parameter 'rid'"),
        ("pause", {"mode": "away"}, "Invalid enum value 'away'"),
        ("close_session", {}, "missing required field `session_id`"),
    ],
)
def test_wrong_requests_by_name(name: str, values: dict[str, Any], expected: str) -> None:
    with pytest.raises(BadRequest, match=expected):
        request_of(name, values)


def test_what_only_the_admin_key_may_do() -> None:
    """Written out: a route that is opened to every client by mistake is seen here."""
    paths = {key.partition(" ")[2] for key in control.Control.OPENAPI if key.startswith("POST")}
    paths |= {path for verb in VERBS.values() for path in verb.paths}
    assert paths - ORDERS == {"/abort_request", "/open_session", "/close_session", "/precompile"}


def test_a_runner_verb_reaches_a_runner_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "VERB_OF", {TouchReq: TOUCH})
    for runner, expected in ((Touched(8, 8), {"touched": 3}), (FakeRunner(8, 8), None)):
        answers: list[ControlOutput] = []
        made = Verbs(None, runner, None, answers.append, lambda: 0.0, {})  # type: ignore[arg-type]
        made.take(TouchReq(times=3))
        assert answers[0].ok == (expected is not None)
        assert answers[0].data == expected or answers[0].data["code"] == "not_supported"


def test_a_runner_verb_reaches_the_runner_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "CALLS", {**CALLS, "touch": tuple[TouchReq]})
    orders, answers, memory = Address.memory(), Address.memory(), MaskWriter()
    for order in (call("touch", TouchReq(times=3)), call("touch", 5), call("__init__", 5), call("verify")):
        orders.outbox().send(order)
    orders.inbox().close()
    follower = Follower(orders.inbox(), answers.outbox(), MaskReader(memory.file), Touched(8, 8), None)
    with pytest.raises(MailboxClosed):
        follower.serve()
    memory.close()
    done, *failures = answers.inbox().receive(0)
    assert done == Done({"touched": 3})
    assert [type(one) for one in failures] == [Failure] * 3


def test_arguments_arrive_with_their_types() -> None:
    assert arguments_of(call("drop_images", (1, 2))) == ((1, 2),)
    assert arguments_of(call("restore_memory", ("weights",), "x")) == (("weights",), "x")
    with pytest.raises(WireError, match="not a drop_images"):
        arguments_of(call("drop_images", "x"))
    with pytest.raises(WireError, match="unknown call 'close'"):
        arguments_of(call("close"))
    with pytest.raises(WireError, match="a verify cannot be written"):
        call("verify", object())
