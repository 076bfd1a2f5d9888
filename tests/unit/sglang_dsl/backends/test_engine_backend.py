"""EngineBackend over a scripted engine: what is sent, what comes back, how faults are told."""

from __future__ import annotations

import asyncio
import gc
import json
import time
import weakref
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

import sglang_dsl as sgl
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import (
    Aborted,
    BadRequest,
    DeadlineExceeded,
    QueueFull,
    RuntimeFault,
    UnsupportedConstraint,
)
from runtime.protocol.io_struct import ChoiceScores, GenerateOutput, GenerateReqInput, OutputDelta
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams
from sglang_dsl import BackendError, EngineBackend, ProgramCancelled, Timeout, Unsupported, gen, select
from sglang_dsl.backends import as_backend
from sglang_dsl.backends.base import Call, Prompt
from sglang_dsl.backends.common.native import as_json
from sglang_dsl.backends.common.transport import json_body


class ScriptedEngine:
    """Answers every request with the same text; keeps the requests."""

    model_path = "/models/scripted"

    def __init__(self, text: str = "héllo wörld", fault: RuntimeFault | None = None) -> None:
        self.text, self.fault = text, fault
        self.requests: list[GenerateReqInput] = []
        self.closed = False

    def output(self, request: GenerateReqInput, text: str, finish: Any) -> OutputDelta:
        meta = {"id": request.rid, "finish_reason": finish, "prompt_tokens": 3, "completion_tokens": 2}
        scores = None
        if request.choices is not None:
            scores = [ChoiceScores(c, [i], [-1.0 - i], [-2.0]) for i, c in enumerate(request.choices)]
        return OutputDelta(text, [1, 2], meta, scores)

    async def submit(self, request: GenerateReqInput) -> GenerateOutput:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.fault is not None:
            raise self.fault
        return self.output(request, self.text, {"type": "stop"})

    async def submit_batch(self, request: GenerateReqInput) -> list[GenerateOutput | RuntimeFault]:
        request.normalize_batch_and_arguments()
        return [await self.submit(one) for one in request]

    async def stream_deltas(self, request: GenerateReqInput) -> AsyncIterator[OutputDelta]:
        self.requests.append(request)
        for begin, end in pairwise((0, 1, 1, 4, len(self.text))):
            yield self.output(request, self.text[begin:end], None)
        if self.fault is not None:
            raise self.fault
        yield self.output(request, "", {"type": "stop"})

    def flush_cache(self) -> bool:
        return True

    def state(self) -> dict[str, Any]:
        return {"running": 0}

    def close(self) -> None:
        self.closed = True


@sgl.function
def program(s: Any, **words: Any) -> None:
    s += sgl.user("q") + sgl.assistant("Well, " + gen("a", **words))


def test_an_engine_is_a_backend_as_it_is() -> None:
    engine = ScriptedEngine()
    state = program.run(backend=engine)
    assert state["a"] == "héllo wörld"
    (request,) = engine.requests
    assert request.text is None
    assert [(m.role, m.content, m.open) for m in request.messages or []] == [
        ("user", "q", False),
        ("assistant", "Well, ", True),
    ]
    sgl.set_default_backend(engine)
    assert sgl.flush_cache() is True
    info = sgl.get_server_info()
    assert (info["backend"], info["model_path"], info["running"]) == ("engine", "/models/scripted", 0)
    assert isinstance(as_backend(engine), EngineBackend)


def test_words_become_fields() -> None:
    engine = ScriptedEngine()
    program.run(
        regex="a+",
        max_tokens=7,
        stop="!",
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=0,
        backend=engine,
        timeout=9,
    ).sync()
    (request,) = engine.requests
    assert request.constraint is not None
    assert (request.constraint.kind, request.constraint.spec) == ("regex", "a+")
    assert (request.sampling_params.max_new_tokens, request.sampling_params.stop) == (7, ("!",))
    assert (request.return_logprob, request.top_logprobs_num, request.logprob_start_len) == (True, 2, 0)
    assert request.timeout_s == 9


def test_completion_prompts_go_as_text() -> None:
    engine = ScriptedEngine()
    sgl.function(lambda s: s.__iadd__("a b " + gen("x"))).run(backend=engine).sync()
    assert (engine.requests[0].text, engine.requests[0].messages) == ("a b ", None)


def test_a_stream_comes_in_pieces() -> None:
    state = program.run(backend=ScriptedEngine(), stream=True)
    assert list(state.text_iter("a")) == ["h", "éll", "o wörld"]
    assert state.get_meta_info("a")["completion_tokens"] == 2


def test_samples_are_one_request() -> None:
    engine = ScriptedEngine()
    state = program.run(n=3, seed=5, backend=engine)
    assert state["a"] == ["héllo wörld"] * 3
    assert len(engine.requests) == 3
    assert len({str(one.rid).rpartition("_")[0] for one in engine.requests}) == 1
    assert state.get_meta_info("a")["completion_tokens"] == 6
    assert len(state.get_meta_info("a")["samples"]) == 3


def test_choices_are_scored() -> None:
    engine = ScriptedEngine()

    @sgl.function
    def pick(s: Any) -> None:
        s += "p" + select("c", ["x", "y"], choices_method="unconditional_likelihood_normalized")

    state = pick.run(backend=engine)
    assert state["c"] == "x"
    assert (engine.requests[0].choices, engine.requests[0].unconditional) == (["x", "y"], True)
    assert state.get_meta_info("c")["scores"] == [1.0, 0.0]


def test_forks_commit_the_shared_prefix_once() -> None:
    engine = ScriptedEngine()

    @sgl.function
    def branches(s: Any) -> None:
        s += "shared"
        forks = s.fork(3)
        forks += lambda i: str(i) + gen("x")
        forks.join()

    branches.run(backend=engine)
    texts = [(r.text, r.sampling_params.max_new_tokens) for r in engine.requests]
    assert texts == [("shared", 0), ("shared0", 128), ("shared1", 128), ("shared2", 128)]


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (BadRequest("is wrong", where="text", hint="fix it"), BackendError),
        (UnsupportedConstraint("lookahead"), Unsupported),
        (DeadlineExceeded("too late"), Timeout),
        (QueueFull("full", hint="try later"), BackendError),
        (Aborted("by an operator"), ProgramCancelled),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_faults_keep_status_request_and_hint(fault: RuntimeFault, kind: type, stream: bool) -> None:
    engine = ScriptedEngine(fault=fault)
    state = program.run(backend=engine, stream=stream)
    with pytest.raises(kind) as caught:
        state["a"]
    error = caught.value
    assert type(error) is kind
    assert (error.status, error.retryable, error.hint) == (fault.status, fault.retryable, fault.hint)
    assert error.request_id == engine.requests[-1].rid
    assert error.variable == "a"
    assert isinstance(error.__cause__, type(fault)) or isinstance(error.__cause__.__cause__, type(fault))
    assert fault.message in str(error)


def test_one_failing_sample_fails_the_call() -> None:
    class Third(ScriptedEngine):
        async def submit_batch(self, request: GenerateReqInput) -> list[GenerateOutput | RuntimeFault]:
            first, second, _ = await super().submit_batch(request)
            return [first, second, QueueFull("full")]

    with pytest.raises(BackendError, match="full"):
        program.run(n=3, backend=Third())["a"]


def test_options_no_request_has_are_refused() -> None:
    engine = ScriptedEngine()
    prompt = Prompt((Message("raw", "x", open=True),))
    call = Call(prompt, SamplingParams(), options={"no_such_option": 1})
    with pytest.raises(Unsupported, match="no_such_option"):
        asyncio.run(EngineBackend(engine).generate(call))
    assert engine.requests == []


@pytest.mark.parametrize(
    "call",
    [
        Call(
            Prompt((Message("raw", "x", open=True),)),
            SamplingParams(max_new_tokens=4, stop=("a",), seed=1),
            n=3,
        ),
        Call(
            Prompt((Message("user", "Hi"), Message("assistant", "Well", open=True)), ({"type": "function"},)),
            SamplingParams(logit_bias={3: 0.5}),
            Constraint("regex", "a+"),
            timeout=9.0,
            tool_choice="none",
        ),
        Call(Prompt((Message("user", "é"),)), SamplingParams(), top_logprobs=2, options={"priority": 1}),
        Call(Prompt((Message("user", ""),)), SamplingParams(), logprob_start_len=0),
    ],
    ids=["text", "turns", "top_logprobs", "logprob_start_len"],
)
def test_engine_and_endpoint_are_sent_the_same_request(call: Call) -> None:
    endpoint = sgl.RuntimeEndpoint("http://127.0.0.1:1", lazy=True)
    sent = EngineBackend(ScriptedEngine()).as_request(call)
    body = as_json(endpoint.as_request(call))
    assert body == as_json(sent)
    # What a server makes of the body is what an engine gets.
    received = msgspec.convert(json.loads(json_body(body)), GenerateReqInput)
    received.sampling_params, _ = SamplingParams.from_user(received.sampling_params)
    assert received == msgspec.structs.replace(sent, rid=None)


def test_one_reply_may_call_tools() -> None:
    prompt = Prompt((Message("user", "x"),), ({"type": "function", "function": {"name": "f"}},))
    with pytest.raises(Unsupported, match="is one text"):
        asyncio.run(EngineBackend(ScriptedEngine()).generate(Call(prompt, SamplingParams(), n=2)))


def test_stop_patterns_reach_the_request() -> None:
    engine = ScriptedEngine()
    program.run(stop_regex="a+", backend=engine)["a"]
    assert engine.requests[-1].sampling_params.stop_regex == ("a+",)


def test_a_given_engine_is_not_closed_and_takes_no_words() -> None:
    engine = ScriptedEngine()
    asyncio.run(EngineBackend(engine).aclose())
    assert not engine.closed
    with pytest.raises(TypeError, match="already running"):
        EngineBackend(engine, dtype="auto")


def test_a_run_keeps_no_engine_alive_when_it_is_over() -> None:
    """Timers of the loop hold the context they were made in, and that a program's scope."""

    @sgl.function
    def part(s: Any) -> None:
        s += "x" + gen("a", max_tokens=2)

    @sgl.function
    def whole(s: Any) -> None:
        s += "y" + gen("b", max_tokens=2)
        assert part.run()["a"]

    engine = ScriptedEngine()
    held = weakref.ref(engine)
    whole.run(backend=EngineBackend(engine), timeout=1000)["b"]
    del engine
    deadline = time.monotonic() + 60
    while held() is not None:
        assert time.monotonic() < deadline
        gc.collect()
        time.sleep(0.01)
