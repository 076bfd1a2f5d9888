"""The whole pipeline around a runner of ints: waiting, cancelling, dying, and who hears of it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runtime.config.engine import EngineConfig
from runtime.config.model import ModelSpec, RopeSpec
from runtime.plan import StepPlan, StepResult, TokenMask
from runtime.processes.checkpoint.model import Model
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.pipeline.launch import Pipeline, start
from runtime.processes.pipeline.loading import Loaded
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import (
    Aborted,
    BadRequest,
    DeadlineExceeded,
    EngineDead,
    InternalFault,
    ModelLoadError,
    RuntimeFault,
)
from runtime.protocol.io_struct import (
    FlushCacheReq,
    GenerateOutput,
    GenerateReqInput,
    GetStateReq,
    TokenOutput,
)
from runtime.protocol.sampling import SamplingParams
from runtime.scheduler.loop import Loop
from tests.unit.runtime.scheduler.fake import FakeRunner

VOCAB = 512
SPEC = ModelSpec(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=8, num_layers=1, num_heads=1,
    num_kv_heads=1, head_dim=8, ffn_size=8, norm_eps=1e-5, rope=RopeSpec(1e4), windows=(None,),
    qkv_bias=False, output_bias=False,
    mlp_bias=False, qk_norm=False, tie_embeddings=True, max_position_embeddings=4096, eos_ids=(), bos_id=None,
    dtype="float32",
)  # fmt: skip
ENDLESS = SamplingParams(max_new_tokens=4000)


class Troubled(FakeRunner):
    """A fake runner with a gate that can be shut (but for some steps to come; the next one hangs) and errors
    that can be ordered. Steps of ENDLESS requests are so slow that 80 s pass until they end."""

    def __init__(self) -> None:
        super().__init__(8192, VOCAB)
        self.open = threading.Event()
        self.open.set()
        self.free_steps = 0
        self.rest_s = 0.0
        self.steps = 0
        self.fail_at: Callable[[int], bool] = lambda step: False
        self.closed = False

    def launch(self, plan: StepPlan) -> None:
        self.steps += 1
        if self.fail_at(self.steps):
            raise OSError("the device fell off the bus")
        self.rest_s = 0.02 if any(row.sampling.max_new_tokens > 3000 for row in plan.rows) else 0.0005
        super().launch(plan)

    def finish(self, masks: Mapping[int, TokenMask]) -> StepResult:
        if self.free_steps:
            self.free_steps -= 1
        else:
            self.open.wait(300)
        time.sleep(self.rest_s)
        return super().finish(masks)

    def close(self) -> None:
        self.closed = True
        super().close()


@pytest.fixture(scope="module")
def model(tokenizer_files: dict[str, dict[str, Any]]) -> Model:
    return Model(Path("nowhere"), SPEC, Tokenizer(tokenizer_files["byte level"], {}, VOCAB))


@pytest.fixture
def runner() -> Troubled:
    return Troubled()


@pytest.fixture
def pipeline(model: Model, runner: Troubled) -> Iterator[Pipeline]:
    made = start(EngineConfig(close_timeout_s=60.0), model, lambda: Loaded(runner))
    yield made
    runner.open.set()
    made.close()


def blocking(pipeline: Pipeline, request: GenerateReqInput) -> GenerateOutput:
    return pipeline.manager.generate(request)


def settled(pipeline: Pipeline) -> dict[str, Any]:
    """The scheduler's state once nothing lives in it any more."""
    for _ in range(6000):
        state = pipeline.manager.control(GetStateReq(), 60.0).data
        if not (state["running"] or state["waiting"] or state["compiling"]):
            return state
        time.sleep(0.01)
    raise AssertionError(f"requests are left: {state}")


def test_blocking_async_and_streamed_answers_agree(pipeline: Pipeline, runner: Troubled) -> None:
    request = GenerateReqInput(text="the dog", sampling_params=SamplingParams(max_new_tokens=40))
    first = blocking(pipeline, request)

    async def ask() -> tuple[GenerateOutput, list[GenerateOutput]]:
        whole = await pipeline.manager.submit(request)
        runner.free_steps = 10  # no more than that before something was read
        runner.open.clear()
        parts = []
        async for part in pipeline.manager.stream(request, cumulative=True):
            parts.append(part)
            runner.open.set()
        return whole, parts

    whole, parts = asyncio.run(ask())
    assert first.text == whole.text == parts[-1].text
    assert first.output_ids == whole.output_ids == parts[-1].output_ids
    assert len(first.output_ids) == 40 == first.meta["completion_tokens"]
    assert first.meta["finish_reason"] == {"type": "length", "length": 40}
    assert whole.meta["cached_tokens"] > 0 == first.meta["cached_tokens"]
    assert len(parts) > 1
    for sooner, later in itertools.pairwise(parts):
        assert later.text.startswith(sooner.text)
        assert sooner.meta["finish_reason"] is None


def test_many_loops_and_threads_at_once(pipeline: Pipeline) -> None:
    def requests(seed: int) -> list[GenerateReqInput]:
        return [
            GenerateReqInput(
                text=f"{seed % 3} the fox {number % 4}", sampling_params=SamplingParams(max_new_tokens=12)
            )
            for number in range(12)
        ]

    async def gather(seed: int) -> list[GenerateOutput]:
        return list(await asyncio.gather(*(pipeline.manager.submit(request) for request in requests(seed))))

    def by_loop(seed: int) -> list[GenerateOutput]:
        return asyncio.run(gather(seed))

    def by_thread(seed: int) -> list[GenerateOutput]:
        return [blocking(pipeline, request) for request in requests(seed)]

    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(by_loop if seed % 2 else by_thread, seed) for seed in range(6)]
        answers = [[output.text for output in job.result(300)] for job in jobs]
    assert answers[0] == answers[3]
    assert answers[1] == answers[4]
    assert answers[2] == answers[5]
    assert pipeline.manager.live == 0


def test_a_cancelled_task_frees_its_request(pipeline: Pipeline, runner: Troubled) -> None:
    async def leave() -> None:
        task = asyncio.create_task(
            pipeline.manager.submit(GenerateReqInput(rid="again", text="the dog", sampling_params=ENDLESS))
        )
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(leave())
    assert pipeline.manager.live == 0
    state = settled(pipeline)
    assert (state["failed"], state["finished"]) == (1, 0)
    assert state["free"] + state["evictable"] == state["slots"]
    # Its id can be used again at once, and news of the old one are not taken for the new one's.
    request = GenerateReqInput(rid="again", text="the dog", sampling_params=SamplingParams(max_new_tokens=3))
    assert len(blocking(pipeline, request).output_ids) == 3


def test_leaving_a_stream_aborts(pipeline: Pipeline) -> None:
    async def peek() -> None:
        stream = pipeline.manager.stream(GenerateReqInput(text="the dog", sampling_params=ENDLESS))
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(peek())
    assert settled(pipeline)["failed"] == 1
    assert pipeline.manager.live == 0


def test_abort_reaches_the_one_who_waits(pipeline: Pipeline) -> None:
    def ask(rid: str) -> GenerateOutput:
        return blocking(pipeline, GenerateReqInput(rid=rid, text="the dog", sampling_params=ENDLESS))

    with ThreadPoolExecutor(3) as pool:
        jobs = {rid: pool.submit(ask, rid) for rid in ("a", "b", "c")}
        while pipeline.manager.live < 3:
            time.sleep(0.005)
        pipeline.manager.abort("no such id")
        pipeline.manager.abort("b")
        with pytest.raises(Aborted):
            jobs["b"].result(300)
        assert not jobs["a"].done()
        pipeline.manager.abort(None)
        for rid in "ac":
            with pytest.raises(Aborted):
                jobs[rid].result(300)


def test_a_loop_that_closed_is_not_waited_for(pipeline: Pipeline) -> None:
    loop = asyncio.new_event_loop()
    stream = pipeline.manager.stream(GenerateReqInput(text="the dog", sampling_params=ENDLESS))
    loop.run_until_complete(anext(stream))
    loop.close()
    assert settled(pipeline)["failed"] == 1
    # What asyncio would do with a generator nobody iterates any more.
    with pytest.raises(StopIteration):
        stream.aclose().send(None)
    assert pipeline.manager.live == 0


def test_two_live_requests_with_one_id(pipeline: Pipeline) -> None:
    with closing(
        pipeline.manager.texts(GenerateReqInput(rid="x", text="a", sampling_params=ENDLESS))
    ) as outputs:
        next(outputs)
        with pytest.raises(BadRequest) as caught:
            blocking(pipeline, GenerateReqInput(rid="x", text="a"))
    assert caught.value.where == "rid"


def test_a_deadline_ends_the_request_and_only_it(pipeline: Pipeline) -> None:
    with pytest.raises(DeadlineExceeded):
        blocking(pipeline, GenerateReqInput(text="the dog", sampling_params=ENDLESS, timeout_s=0.1))
    assert blocking(pipeline, GenerateReqInput(text="the dog")).output_ids


def test_a_failed_step_fails_its_requests_with_the_cause_and_the_engine_goes_on(
    pipeline: Pipeline, runner: Troubled
) -> None:
    wanted = blocking(pipeline, GenerateReqInput(text="the dog")).text
    runner.fail_at = lambda step: True
    for _ in range(5):
        with pytest.raises(InternalFault, match="fell off the bus"):
            blocking(pipeline, GenerateReqInput(text="the dog"))
    runner.fail_at = lambda step: False
    assert blocking(pipeline, GenerateReqInput(text="the dog")).text == wanted


def test_one_failing_option_fails_the_choice_with_its_reason(pipeline: Pipeline, runner: Troubled) -> None:
    runner.fail_at = lambda step: step == 1
    with pytest.raises(InternalFault, match="fell off the bus"):
        blocking(pipeline, GenerateReqInput(text="the dog", choices=["a", "b"]))
    settled(pipeline)
    answer = blocking(pipeline, GenerateReqInput(text="the dog", choices=["a", "b"]))
    assert answer.choices is not None
    assert [choice.text for choice in answer.choices] == ["a", "b"]


def test_a_bad_constraint_is_told_and_forgotten(pipeline: Pipeline) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeFault) as caught:
            blocking(pipeline, GenerateReqInput(text="a", constraint=Constraint("regex", "(")))
        assert caught.value.status == 400
    assert blocking(pipeline, GenerateReqInput(text="a", constraint=Constraint("regex", "abc"))).text == "abc"


def test_close_tells_everybody_and_is_repeatable(pipeline: Pipeline, runner: Troubled) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(blocking, pipeline, GenerateReqInput(text="the dog", sampling_params=ENDLESS))
        while not pipeline.manager.live:
            time.sleep(0.005)
        pipeline.close()
        with pytest.raises(EngineDead, match="closed"):
            waiting.result(300)
    pipeline.close()
    assert runner.closed
    with pytest.raises(EngineDead, match="closed"):
        blocking(pipeline, GenerateReqInput(text="the dog"))
    with pytest.raises(EngineDead):
        pipeline.manager.control(FlushCacheReq(), 1.0)


def test_a_hanging_step_is_noticed(model: Model, runner: Troubled) -> None:
    config = EngineConfig(step_timeout_s=0.2, close_timeout_s=0.2)
    hanging = start(config, model, lambda: Loaded(runner))
    runner.open.clear()
    with pytest.raises(EngineDead, match=r"0\.2 s"):
        blocking(hanging, GenerateReqInput(text="the dog"))
    with pytest.raises(EngineDead):
        blocking(hanging, GenerateReqInput(text="the dog"))
    runner.open.set()
    hanging.close()


def test_a_dead_scheduler_is_everybodys_error(
    model: Model, runner: Troubled, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Loop.step

    def broken(self: Loop) -> list[TokenOutput]:
        if self._runner is not runner:
            return whole(self)  # other tests' engines live on
        raise ZeroDivisionError("a defect of the scheduler")

    made = start(EngineConfig(), model, lambda: Loaded(runner))
    runner.open.clear()
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(blocking, made, GenerateReqInput(text="the dog", sampling_params=ENDLESS))
    while made.manager.live < 1:
        time.sleep(0.002)
    monkeypatch.setattr(Loop, "step", broken)
    runner.open.set()
    with pytest.raises(RuntimeFault, match="a defect of the scheduler"):
        asked.result(300)
    pool.shutdown()
    for _ in range(3):
        with pytest.raises(RuntimeFault, match="a defect of the scheduler"):
            blocking(made, GenerateReqInput(text="the dog"))
    monkeypatch.undo()
    with pytest.raises(EngineDead, match="a defect of the scheduler"):
        blocking(made, GenerateReqInput(text="the dog"))
    made.close()
    assert runner.closed


def test_what_loading_raises_reaches_the_caller_as_itself(model: Model) -> None:
    def broken() -> Loaded:
        raise ModelLoadError("the weights are gone", where="model.safetensors")

    with pytest.raises(ModelLoadError, match=r"model\.safetensors: the weights are gone"):
        start(EngineConfig(), model, broken)


def test_loading_has_a_deadline(model: Model, runner: Troubled) -> None:
    late = threading.Event()

    def slow() -> Loaded:
        late.wait(300)
        return Loaded(runner)

    with pytest.raises(EngineDead, match=r"0\.1 s"):
        start(EngineConfig(load_timeout_s=0.1), model, slow)
    late.set()
    for _ in range(6000):
        if runner.closed:
            return
        time.sleep(0.01)
    raise AssertionError("the late runner was not released")


def test_flush_and_state(pipeline: Pipeline) -> None:
    blocking(pipeline, GenerateReqInput(text="the dog"))
    assert pipeline.manager.control(GetStateReq(), 60.0).data["evictable"] > 0
    assert pipeline.manager.control(FlushCacheReq(), 60.0).ok
    assert pipeline.manager.control(GetStateReq(), 60.0).data["evictable"] == 0
