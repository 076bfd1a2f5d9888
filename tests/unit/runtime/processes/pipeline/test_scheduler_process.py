"""SchedulerProcess around a runner of ints: every question is answered once, and so is every request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from runtime.config.scheduler import SchedulerConfig
from runtime.ipc.mailbox import MemoryMailbox
from runtime.plan import StepPlan
from runtime.processes.pipeline.scheduler_process import SchedulerProcess
from runtime.protocol.errors import BadRequest, RuntimeFault, WireError, from_dict
from runtime.protocol.io_struct import (
    AbortReq,
    BatchStrOutput,
    BatchTokenIDOutput,
    CloseSessionReq,
    ContinueReq,
    ControlOutput,
    FlushCacheReq,
    GetStateReq,
    GroupFailed,
    HealthReq,
    OpenSessionReq,
    PauseReq,
    ProfileReq,
    ReleaseMemoryReq,
    SetStateReq,
    SingleReq,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from runtime.protocol.sampling import SamplingParams
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.scheduler import Scheduler
from tests.unit.runtime.scheduler.fake import HIDDEN, FakeRunner

VOCAB = 64
WAIT = 60.0


class Slow(FakeRunner):
    """A fake runner whose steps take a little, and longer where somebody may generate 3,000 tokens: such a
    request is not meant to end by itself."""

    rest_s = 0.001

    def launch(self, plan: StepPlan) -> None:
        endless = any(row.sampling.max_new_tokens >= 3000 for row in plan.rows)
        time.sleep(0.02 if endless else self.rest_s)
        super().launch(plan)


class Notes:
    """A profiler that only remembers."""

    recording = True

    def __init__(self) -> None:
        self.steps, self.on, self.closed = 0, False, False

    def start(self, folder: str | None, steps: int | None) -> dict[str, Any]:
        if self.on:
            raise BadRequest("a profile is being made already", where="profile")
        self.on = True
        return {"folder": folder, "steps": steps}

    def stop(self) -> dict[str, Any]:
        self.on = False
        return {"written": self.steps}

    def stepped(self) -> None:
        self.steps += 1

    def close(self) -> None:
        self.closed = True


class Narrow(MemoryMailbox):
    """A mailbox through which news of more than `limit` ids, or of a request called "big", do not fit."""

    def send(self, item: Any) -> None:
        if isinstance(item, BatchTokenIDOutput):
            for output in item.outputs:
                if output.rid == "big" and output.new_ids:
                    raise WireError("a message of 9 bytes; at most 8 are taken", where="BatchTokenIDOutput")
        super().send(item)


class Harness:
    """A process in a thread, and what it has answered."""

    def __init__(self, overlap: bool, outbox: MemoryMailbox | None = None) -> None:
        self.inbox, self.outbox = MemoryMailbox(), outbox or MemoryMailbox()
        self.runner = runner = Slow(4096, VOCAB)
        self.scheduler = Scheduler(
            SchedulerConfig(overlap=overlap),
            slots=4096,
            vocabulary=Vocabulary(tuple(bytes([n]) for n in range(VOCAB)), frozenset()),
            encode=lambda text: list(text.encode()),
            grammar=None,
            verify_params=runner.verify,
        )
        self.notes = Notes()
        self.process = SchedulerProcess(
            self.scheduler, runner, None, self.inbox, self.outbox, profiler=self.notes
        )
        self.answers: dict[str, ControlOutput] = {}
        self.ends: dict[str, TokenOutput] = {}
        self.ids: dict[str, list[int]] = {}
        self.others: list[Any] = []
        self.begun: list[str] = []
        self.thread = threading.Thread(target=self.process.run)
        self.thread.start()

    def send(self, *items: Any) -> None:
        for item in items:
            self.inbox.send(item)

    def read(self, timeout: float) -> None:
        for item in self.outbox.receive(timeout):
            match item:
                case ControlOutput():
                    assert item.rid not in self.answers
                    self.answers[item.rid] = item
                case BatchTokenIDOutput():
                    self.begun += [text.rid for text in item.begun]
                    for output in item.outputs:
                        assert output.rid in self.begun
                        self.ids.setdefault(output.rid, []).extend(output.new_ids)
                        if output.finish is not None:
                            assert output.rid not in self.ends
                            self.ends[output.rid] = output
                case _:
                    self.others.append(item)

    def until(self, done: Any) -> None:
        deadline = time.monotonic() + WAIT
        while not done():
            assert time.monotonic() < deadline, (self.answers, self.ends)
            self.read(0.05)

    def ask(self, question: SingleReq) -> ControlOutput:
        self.send(question)
        self.until(lambda: question.rid in self.answers)
        return self.answers[question.rid]

    def end_of(self, rid: str) -> TokenOutput:
        self.until(lambda: rid in self.ends)
        return self.ends[rid]

    def fault_of(self, rid: str) -> RuntimeFault:
        finish = self.end_of(rid).finish
        assert finish is not None
        assert finish.error is not None
        return from_dict(finish.error)

    def close(self) -> None:
        self.inbox.close()
        self.thread.join(WAIT)
        assert not self.thread.is_alive()


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def harness(request: pytest.FixtureRequest) -> Iterator[Harness]:
    made = Harness(request.param)
    yield made
    made.close()


def request(rid: str, new: int = 5, prompt: int = 8, **fields: Any) -> TokenizedGenerateReqInput:
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    return TokenizedGenerateReqInput(
        rid=rid, input_ids=list(range(prompt)), sampling_params=params, http_worker_ipc="w", **fields
    )


def test_requests_are_announced_and_answered_once(harness: Harness) -> None:
    harness.send(*(request(str(n), stream=n % 2 == 0) for n in range(20)))
    harness.until(lambda: len(harness.ends) == 20)
    assert sorted(harness.begun) == sorted(str(n) for n in range(20))
    assert all(len(ids) == 5 for ids in harness.ids.values())
    assert {output.http_worker_ipc for output in harness.ends.values()} == {"w"}


def test_questions_are_answered_while_requests_run(harness: Harness) -> None:
    harness.send(request("long", new=3000))
    assert harness.ask(HealthReq()).data == {"live": 1, "paused": None, "released": []}
    state = harness.ask(GetStateReq(http_worker_ipc="w"))
    assert state.ok
    assert state.http_worker_ipc == "w"
    assert state.data["live"] == 1
    tuned = harness.ask(SetStateReq(values={"max_running_requests": 3}))
    assert tuned.data["max_running_requests"] == 3
    refused = harness.ask(SetStateReq(values={"nonsense": 3}))
    assert not refused.ok
    assert from_dict(refused.data).where == "nonsense"
    harness.send(AbortReq(rid="long", message="enough"))
    assert "enough" in str(harness.fault_of("long"))


def test_abort_by_id_by_beginning_and_all(harness: Harness) -> None:
    harness.send(*(request(rid, new=3000) for rid in ("a/1", "a/2", "b/1", "c/1")))
    harness.send(AbortReq(rid="b/1"), AbortReq(rid="a/", prefix=True), AbortReq(rid="unknown"))
    for rid in ("b/1", "a/1", "a/2"):
        assert harness.fault_of(rid).code == "aborted"
    assert "c/1" not in harness.ends
    harness.send(AbortReq(abort_all=True))
    assert harness.fault_of("c/1").code == "aborted"


def test_what_a_frontend_that_is_gone_had_asked_for_is_cancelled(harness: Harness) -> None:
    for frontend in ("w-0", "w-1"):
        for rid in ("1", "2"):
            asked = request(f"{frontend}/{rid}", new=3000)
            harness.send(msgspec.structs.replace(asked, http_worker_ipc=frontend))
    harness.until(lambda: len(harness.begun) == 4)
    harness.send(AbortReq(frontend="w-1", message="w-1 is gone"))
    for rid in ("w-1/1", "w-1/2"):
        assert "w-1 is gone" in str(harness.fault_of(rid))
    assert harness.ask(HealthReq()).data["live"] == 2
    assert not {"w-0/1", "w-0/2"} & set(harness.ends)
    harness.ask(PauseReq(mode="in_place"))
    assert harness.ask(HealthReq()).data == {"live": 2, "paused": "in_place", "released": []}


def test_a_flush_is_refused_while_requests_run_and_done_when_they_have_ended(harness: Harness) -> None:
    harness.send(request("long", new=3000))
    harness.until(lambda: harness.begun)
    refused = harness.ask(FlushCacheReq())
    assert not refused.ok
    assert "1 request is not finished" in refused.message
    started = time.monotonic()
    refused = harness.ask(FlushCacheReq(timeout_s=0.2))
    assert not refused.ok
    assert time.monotonic() - started >= 0.2
    patient = FlushCacheReq(timeout_s=WAIT)
    harness.send(patient)
    assert harness.ask(HealthReq()).ok
    assert patient.rid not in harness.answers
    harness.send(AbortReq(rid="long"))
    harness.until(lambda: patient.rid in harness.answers)
    assert harness.answers[patient.rid].ok
    assert harness.ask(GetStateReq()).data["evictable"] == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_paused_requests_go_on_as_if_nothing_had_been(harness: Harness, mode: Any) -> None:
    harness.runner.rest_s = 0.02
    harness.send(request("before", new=300, stream=True))
    harness.until(lambda: len(harness.ids.get("before", ())) > 3)
    assert harness.ask(PauseReq(mode=mode)).ok
    harness.runner.rest_s = 0.001
    harness.send(request("during", new=300))
    harness.ask(HealthReq())
    seen = len(harness.ids["before"])
    for _ in range(20):  # each is a turn of the scheduler, in which it would make a step
        harness.ask(HealthReq())
    assert len(harness.ids["before"]) - seen <= 2
    assert harness.ask(GetStateReq()).data["paused"] == mode
    assert harness.ask(ContinueReq()).ok
    harness.end_of("before")
    harness.end_of("during")
    assert harness.ids["before"] == harness.ids["during"]


def test_pausing_with_abort_ends_what_runs(harness: Harness) -> None:
    harness.send(request("x", new=3000))
    assert harness.ask(PauseReq(mode="abort")).ok
    assert "paused" in str(harness.fault_of("x"))
    harness.send(request("y"))
    assert harness.ask(ContinueReq()).ok
    harness.end_of("y")


def test_sessions_are_opened_and_closed(harness: Harness) -> None:
    made = harness.ask(OpenSessionReq(session_id="s", capacity=100))
    assert made.data["session_id"] == "s"
    again = harness.ask(OpenSessionReq(session_id="s"))
    assert not again.ok
    assert from_dict(again.data).status == 400
    fresh = harness.ask(OpenSessionReq(streaming=True)).data["session_id"]
    assert fresh not in ("", "s", None)
    assert harness.ask(CloseSessionReq(session_id="s")).ok
    assert not harness.ask(CloseSessionReq(session_id="s")).ok


def test_profiles(harness: Harness) -> None:
    started = harness.ask(ProfileReq(action="start", steps=3, folder="x"))
    assert started.data == {"folder": "x", "steps": 3}
    assert not harness.ask(ProfileReq(action="start")).ok
    assert harness.ask(ProfileReq(action="stop")).ok
    assert harness.notes.steps > 0


def test_mail_that_is_not_for_the_scheduler_kills_nobody(harness: Harness) -> None:
    odd = GroupFailed(message="not for you")
    assert not harness.ask(odd).ok
    harness.send(BatchStrOutput(rids=[], outputs=[]))
    harness.send(request("x"))
    harness.end_of("x")


def test_a_request_that_cannot_run_is_answered_alone(harness: Harness) -> None:
    harness.send(request("fine"), request("huge", new=10**6), request("odd", prompt=0))
    assert harness.fault_of("huge").status == 400
    assert harness.fault_of("odd").status == 400
    assert harness.end_of("fine").finish is not None
    bad = request("processor")
    bad.sampling_params = SamplingParams(max_new_tokens=2, custom_logit_processor="nobody")
    harness.send(bad)
    assert "nobody" in str(harness.fault_of("processor"))
    assert harness.ask(GetStateReq()).data["live"] == 0


def test_a_request_for_a_vector_is_not_left_without_an_answer(harness: Harness) -> None:
    harness.send(TokenizedEmbeddingReqInput(rid="v", input_ids=[1, 2], http_worker_ipc="w"))
    harness.until(lambda: harness.others)
    [told] = harness.others[0].outputs
    assert (told.rid, told.http_worker_ipc) == ("v", "w")
    assert (told.finish, told.prompt_tokens) == (None, 2)
    assert len(told.embedding) == HIDDEN


def test_a_model_that_sleeps_refuses_texts_and_vectors(harness: Harness) -> None:
    assert harness.ask(ReleaseMemoryReq(parts=("kv_cache",))).ok
    harness.send(request("x"), TokenizedEmbeddingReqInput(rid="v", input_ids=[1, 2], http_worker_ipc="w"))
    assert harness.fault_of("x").code == "not_ready"
    harness.until(lambda: harness.others)
    [told] = harness.others[0].outputs
    assert (told.rid, told.http_worker_ipc) == ("v", "w")
    assert told.finish.error["code"] == "not_ready"
    assert harness.ask(GetStateReq()).data["live"] == 0


def test_a_second_request_with_a_live_id_does_not_disturb_the_first(harness: Harness) -> None:
    harness.send(request("x", new=100), request("x", new=3))
    assert len(harness.end_of("x").new_ids) == 100
    [told] = harness.others
    assert told.outputs[0].http_worker_ipc == "w"
    assert "still running" in told.outputs[0].finish.error["message"]


def test_closing_ends_what_runs() -> None:
    harness = Harness(True)
    harness.send(request("x", new=3000))
    harness.until(lambda: harness.begun)
    harness.close()
    assert harness.fault_of("x").code == "engine_dead"
    assert harness.notes.closed


def test_a_defect_of_the_scheduler_answers_everybody_and_the_process_goes_on(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = harness.scheduler.plan
    left = [2]

    def broken() -> Any:
        if left[0] == 1 or (left[0] and harness.scheduler.busy):  # not before the request is there
            left[0] -= 1
            raise ZeroDivisionError("of all things")
        return plan()

    harness.ask(HealthReq())
    monkeypatch.setattr(harness.scheduler, "plan", broken)
    harness.send(request("a"))
    assert "ZeroDivisionError: of all things" in str(harness.fault_of("a"))
    harness.until(lambda: not left[0])
    harness.send(request("b"))
    assert len(harness.end_of("b").new_ids) == 5


def test_news_that_cannot_travel_fail_their_request_only() -> None:
    harness = Harness(True, Narrow())
    harness.send(request("big"), request("small"))
    assert harness.fault_of("big").code == "wire_error"
    assert len(harness.end_of("small").new_ids) == 5
    assert harness.ask(GetStateReq()).data["live"] == 0
    harness.close()
