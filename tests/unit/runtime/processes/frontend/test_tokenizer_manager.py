"""The frontend around a runner of ints: batches, samples, orders, limits, and who is told of what."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runtime.config.engine import EngineConfig
from runtime.config.model import ModelSpec, RopeSpec
from runtime.formats.reasoning.marks import marks_of
from runtime.plan import StepPlan, StepResult, TokenMask
from runtime.processes.checkpoint.model import Model
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.frontend.client import Begun
from runtime.processes.frontend.prepare import Preparer
from runtime.processes.frontend.prompt import Limits
from runtime.processes.frontend.tokenizer_manager import TokenizerManager
from runtime.processes.pipeline.launch import Pipeline, start
from runtime.processes.pipeline.loading import Loaded
from runtime.protocol.errors import (
    Aborted,
    BadRequest,
    DeadlineExceeded,
    EngineDead,
    InternalFault,
    PromptTooLong,
    QueueFull,
    RuntimeFault,
)
from runtime.protocol.io_struct import (
    AbortReq,
    BatchEmbeddingOutput,
    BatchStrOutput,
    BatchTokenizedGenerateReqInput,
    ControlOutput,
    EmbeddingOutput,
    EmbeddingReqInput,
    FinishReason,
    GenerateOutput,
    GenerateReqInput,
    GetStateReq,
    GroupFailed,
    OutputDelta,
    TokenizedEmbeddingReqInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from runtime.protocol.messages import Message
from runtime.protocol.model_info import ModelInfo
from runtime.protocol.sampling import SamplingParams
from tests.unit.runtime.scheduler.fake import FakeRunner

VOCAB = 512
SPEC = ModelSpec(
    architecture="LlamaForCausalLM", vocab_size=VOCAB, hidden_size=8, num_layers=1, num_heads=1,
    num_kv_heads=1, head_dim=8, ffn_size=8, norm_eps=1e-5, rope=RopeSpec(1e4), windows=(None,),
    qkv_bias=False, output_bias=False,
    mlp_bias=False, qk_norm=False, tie_embeddings=True, max_position_embeddings=4096, eos_ids=(), bos_id=None,
    dtype="float32",
)  # fmt: skip
ENDLESS = {"max_new_tokens": 4000}
LONG = "the dog sleeps; the fox runs on and on. " * 8


class Held(FakeRunner):
    """A fake runner whose steps wait while `open` is not set, and which counts what it computes. Steps of
    ENDLESS requests are so slow that 80 s pass until they end."""

    def __init__(self) -> None:
        super().__init__(40_000, VOCAB)  # room for all of a test's requests
        self.open = threading.Event()
        self.open.set()
        self.rest_s = 0.0
        self.computed = 0
        self.most = 0

    def launch(self, plan: StepPlan) -> None:
        self.computed += sum(len(row.tokens) for row in plan.rows)
        self.most = max(self.most, len(plan.rows))
        self.rest_s = 0.02 if any(row.sampling.max_new_tokens > 3000 for row in plan.rows) else 0.0
        super().launch(plan)

    def finish(self, masks: Mapping[int, TokenMask]) -> StepResult:
        self.open.wait(300)
        time.sleep(self.rest_s)
        return super().finish(masks)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_files: dict[str, dict[str, Any]]) -> Tokenizer:
    return Tokenizer(tokenizer_files["byte level"], {}, VOCAB)


@pytest.fixture
def runner() -> Held:
    return Held()


@pytest.fixture
def pipeline(tokenizer: Tokenizer, runner: Held) -> Iterator[Pipeline]:
    model = Model(Path("nowhere"), SPEC, tokenizer)
    made = start(EngineConfig(close_timeout_s=60.0), model, lambda: Loaded(runner))
    yield made
    runner.open.set()
    made.close()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.005)


def state(pipeline: Pipeline) -> dict[str, Any]:
    return pipeline.manager.control(GetStateReq(), 60.0).data


def idle(pipeline: Pipeline) -> bool:
    found = state(pipeline)
    return not (found["running"] or found["waiting"]) and pipeline.manager.live == 0


def texts(outcomes: list[GenerateOutput | RuntimeFault]) -> list[str]:
    return [outcome.text for outcome in outcomes if isinstance(outcome, GenerateOutput)]


# -- batches -------------------------------------------------------------------------------------------------


def test_a_batch_gives_what_single_requests_give_blocking_or_not_streamed_or_not(pipeline: Pipeline) -> None:
    prompts = ["the dog", "a fox", LONG, "the dog"]
    params = [{"max_new_tokens": 3 + at, "seed": at} for at in range(4)]

    def request() -> GenerateReqInput:
        return GenerateReqInput(text=list(prompts), sampling_params=list(params))

    async def ask() -> tuple[list[str], list[str], list[str]]:
        singles = [
            (await pipeline.manager.submit(GenerateReqInput(text=text, sampling_params=own))).text
            for text, own in zip(prompts, params, strict=True)
        ]
        whole = texts(await pipeline.manager.submit_batch(request()))
        last: dict[int, GenerateOutput] = {}
        pieces = [""] * 4
        async for index, output in pipeline.manager.stream_batch(request()):
            assert isinstance(output, GenerateOutput)
            assert index not in last or last[index].meta["finish_reason"] is None
            last[index] = output
            pieces[index] += output.text
        return singles, whole, pieces

    singles, whole, streamed = asyncio.run(ask())
    assert singles == whole == streamed == texts(pipeline.manager.batch(request()))
    assert idle(pipeline)


def test_items_that_fail_report_themselves(pipeline: Pipeline) -> None:
    request = GenerateReqInput(
        text=["a", "b", "c", "d " * 5000, "e"],
        sampling_params=[{"max_new_tokens": 2}, {"top_p": 7}, {"temprature": 1}, {"max_new_tokens": 2}, {}],
        logprob_start_len=[-1, -1, -1, -1, 99],
        rid=["ra", "rb", "rc", "rd", "re"],
    )
    outcomes = pipeline.manager.batch(request)
    assert isinstance(outcomes[0], GenerateOutput)
    assert outcomes[0].meta["id"] == "ra"
    assert [type(outcome) for outcome in outcomes[1:]] == [BadRequest, BadRequest, PromptTooLong, BadRequest]
    assert [str(outcome.where) for outcome in outcomes[1:] if isinstance(outcome, RuntimeFault)] == [
        "sampling_params.top_p", "sampling_params", "prompt", "logprob_start_len",
    ]  # fmt: skip

    async def stream() -> dict[int, Any]:
        request = GenerateReqInput(text=["a", "b"], sampling_params=[{"max_new_tokens": 2}, {"top_k": -7}])
        return {index: outcome async for index, outcome in pipeline.manager.stream_batch(request)}

    found = asyncio.run(stream())
    assert found[0].meta["finish_reason"]["type"] == "length"
    assert isinstance(found[1], BadRequest)
    assert idle(pipeline)


def test_a_request_that_is_wrong_as_a_whole_is_one_error(pipeline: Pipeline) -> None:
    with pytest.raises(ValueError, match="Duplicate request IDs"):
        pipeline.manager.batch(GenerateReqInput(text=["a", "b"], rid=["x", "x"]))
    with pytest.raises(BadRequest, match="one prompt with one sample"):
        pipeline.manager.generate(GenerateReqInput(text=["a", "b"]))
    assert idle(pipeline)


def test_samples_share_one_prefill_and_come_in_rounds(pipeline: Pipeline, runner: Held) -> None:
    prompts = [LONG + "one", LONG[::-1] + "two"]
    length = [len(pipeline.model.tokenizer.encode(prompt)) for prompt in prompts]
    request = GenerateReqInput(text=prompts, sampling_params={"n": 5, "max_new_tokens": 4}, rid="b")
    outcomes = pipeline.manager.batch(request)
    assert [outcome.meta["id"] for outcome in outcomes if isinstance(outcome, GenerateOutput)] == [
        f"b_{index}" for index in range(10)
    ]
    for index, outcome in enumerate(outcomes):
        assert isinstance(outcome, GenerateOutput)
        assert outcome.meta["prompt_tokens"] == length[index % 2]
        assert outcome.meta["cached_tokens"] >= length[index % 2] - 2
    assert runner.computed < sum(length) + 10 * 7
    assert runner.most >= 5


def test_a_prompt_that_cannot_be_taken_fails_all_its_samples(pipeline: Pipeline) -> None:
    request = GenerateReqInput(text=["ok", "x " * 5000], sampling_params={"n": 3, "max_new_tokens": 2})
    outcomes = pipeline.manager.batch(request)
    assert [isinstance(outcome, PromptTooLong) for outcome in outcomes] == [False, True] * 3


def test_samples_of_messages_go_through_the_template_once(tokenizer: Tokenizer) -> None:
    sent = Sent()
    calls: list[int] = []

    class Counting(Preparer):
        def prepare(self, given: Any) -> Any:
            calls.append(1)
            return super().prepare(given)

    manager = TokenizerManager(Counting(tokenizer, None, Limits(VOCAB, 64, 64)), sent)
    thread = threading.Thread(
        target=lambda: manager.batch(GenerateReqInput(text="the dog", sampling_params={"n": 3, "seed": 1}))
    )
    thread.start()
    wait_for(lambda: len(sent.items) == 1)
    (commit,) = sent.requests()
    assert (commit.sampling_params.max_new_tokens, commit.stream) == (0, False)
    manager.handle(answer(commit.rid))
    wait_for(lambda: len(sent.items) == 4)
    samples = sent.requests()[1:]
    assert [one.sampling_params.seed for one in samples] == [1, 2, 3]
    assert len({one.rid for one in samples}) == 3
    for one in samples:
        manager.handle(answer(one.rid))
    thread.join(300)
    assert not thread.is_alive()
    assert len(calls) == 1
    assert manager.live == 0


# -- leaving -------------------------------------------------------------------------------------------------


def test_cancelling_frees_the_scheduler_at_once(pipeline: Pipeline) -> None:
    async def go() -> None:
        manager = pipeline.manager
        endless = GenerateReqInput(text="the dog", sampling_params=ENDLESS)
        batch = GenerateReqInput(text=["a", "b", "c"], sampling_params=ENDLESS)
        samples = GenerateReqInput(text="fox", sampling_params={**ENDLESS, "n": 3})
        work = (manager.submit(endless), manager.submit_batch(batch), manager.submit_batch(samples))
        tasks = [asyncio.create_task(one) for one in work]
        while (await manager.control_async(GetStateReq(), 60.0)).data["running"] < 7:
            await asyncio.sleep(0.002)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in done)
        # The next answer of the scheduler comes after it has read the orders to abort.
        await manager.control_async(GetStateReq(), 60.0)
        assert (await manager.control_async(GetStateReq(), 60.0)).data["running"] == 0

    asyncio.run(go())
    assert idle(pipeline)


def test_closing_a_stream_of_a_batch_aborts_the_rest(pipeline: Pipeline) -> None:
    async def go() -> None:
        request = GenerateReqInput(text=["a", "b"], sampling_params=[{"max_new_tokens": 1}, ENDLESS])
        async with aclosing(pipeline.manager.stream_batch(request)) as outputs:
            async for _, output in outputs:
                assert isinstance(output, GenerateOutput)
                if output.meta["finish_reason"]:
                    break

    asyncio.run(go())
    wait_for(lambda: idle(pipeline))


def test_a_batch_on_a_loop_that_closed_is_given_up(pipeline: Pipeline) -> None:
    loop = asyncio.new_event_loop()
    outputs = pipeline.manager.stream_batch(GenerateReqInput(text=["a", "b"], sampling_params=ENDLESS))
    loop.run_until_complete(anext(outputs))
    loop.close()
    wait_for(lambda: idle(pipeline))
    # What asyncio would do with a generator nobody iterates any more.
    with pytest.raises(StopIteration):
        outputs.aclose().send(None)


# -- orders --------------------------------------------------------------------------------------------------


def test_aborting_by_id_prefix_and_all(pipeline: Pipeline) -> None:
    async def go() -> None:
        manager = pipeline.manager

        def start(rid: str) -> asyncio.Task[GenerateOutput]:
            return asyncio.create_task(
                manager.submit(GenerateReqInput(text="a", rid=rid, sampling_params=ENDLESS))
            )

        rids = ("job/1", "job/2", "job", "jobs", "other")
        tasks = {rid: start(rid) for rid in rids}
        while manager.live < 5:
            await asyncio.sleep(0.002)
        manager.abort("job")
        with pytest.raises(Aborted) as caught:
            await tasks.pop("job")
        assert caught.value.where == "job", "its own id, not that in the engine"
        partial = caught.value.partial
        assert isinstance(partial, GenerateOutput)
        assert partial.meta["id"] == "job"
        assert partial.meta["finish_reason"] == {"type": "abort"}
        assert len(partial.output_ids) == partial.meta["completion_tokens"]
        assert manager.live == 4
        manager.abort("job/", prefix=True)
        for rid in ("job/1", "job/2"):
            with pytest.raises(Aborted):
                await tasks.pop(rid)
        assert sorted(tasks) == ["jobs", "other"]
        assert not any(task.done() for task in tasks.values())
        manager.abort("nobody")
        manager.abort(None)
        for task in tasks.values():
            with pytest.raises(Aborted):
                await task

    asyncio.run(go())
    wait_for(lambda: idle(pipeline))


def test_samples_that_were_not_sent_yet_can_be_aborted(pipeline: Pipeline, runner: Held) -> None:
    runner.open.clear()
    found: list[Any] = []
    request = GenerateReqInput(text="the dog", sampling_params={"n": 3, "max_new_tokens": 2}, rid="s")
    thread = threading.Thread(target=lambda: found.extend(pipeline.manager.batch(request)))
    thread.start()
    wait_for(lambda: pipeline.manager.live == 1)
    pipeline.manager.abort("s_1")
    runner.open.set()
    thread.join(300)
    assert [isinstance(one, Aborted) for one in found] == [False, True, False]


def test_two_live_requests_with_one_id(pipeline: Pipeline) -> None:
    async def go() -> None:
        first = asyncio.create_task(
            pipeline.manager.submit(GenerateReqInput(text="a", rid="same", sampling_params=ENDLESS))
        )
        while pipeline.manager.live < 1:
            await asyncio.sleep(0.002)
        with pytest.raises(BadRequest, match="'same' is still running"):
            await pipeline.manager.submit(GenerateReqInput(text="b", rid="same"))
        outcomes = await pipeline.manager.submit_batch(
            GenerateReqInput(text=["a", "b"], rid=["same", "new"], sampling_params={"max_new_tokens": 1})
        )
        assert isinstance(outcomes[0], BadRequest)
        assert isinstance(outcomes[1], GenerateOutput)
        assert not first.done()
        first.cancel()

    asyncio.run(go())
    wait_for(lambda: idle(pipeline))


class Sent:
    """An outbox that keeps what it is given."""

    def __init__(self) -> None:
        self.items: list[Any] = []

    def send(self, item: msgspec.Struct) -> None:
        self.items.append(item)

    def close(self) -> None:
        return

    def requests(self) -> list[TokenizedGenerateReqInput]:
        found: list[TokenizedGenerateReqInput] = []
        for item in self.items:
            if isinstance(item, TokenizedGenerateReqInput):
                found.append(item)
            if isinstance(item, BatchTokenizedGenerateReqInput):
                found += item.requests
        return found


END = FinishReason("length")


def answer(rid: str, text: str = "x", finish: FinishReason | None = END, **more: Any) -> Any:
    return BatchStrOutput(rids=[rid], outputs=[TokenOutput(rid, [5], finish=finish, text=text, **more)])


def ask(manager: TokenizerManager, sent: Sent, **fields: Any) -> Future[GenerateOutput]:
    """The answer to a request that has been sent and is waited for in a thread."""
    before = len(sent.items)
    found: Future[GenerateOutput] = Future()

    def wait() -> None:
        try:
            found.set_result(manager.generate(GenerateReqInput(**fields)))
        except RuntimeFault as fault:
            found.set_exception(fault)

    threading.Thread(target=wait, daemon=True).start()
    wait_for(lambda: len(sent.items) > before)
    return found


@pytest.fixture
def sent() -> Sent:
    return Sent()


@pytest.fixture
def manager(tokenizer: Tokenizer, sent: Sent) -> TokenizerManager:
    return TokenizerManager(
        Preparer(tokenizer, None, Limits(VOCAB, 64, 64)), sent, name="worker-1", max_live=2
    )


def test_answers_find_their_way_back_by_name(manager: TokenizerManager, sent: Sent) -> None:
    ask(manager, sent, text="a", rid="r")
    ask(manager, sent, text="a", choices=["b"])
    assert {one.http_worker_ipc for one in sent.requests()} == {"worker-1"}
    assert "worker-1" in sent.requests()[0].rid
    with pytest.raises(BadRequest, match="x1f"):
        manager.generate(GenerateReqInput(text="a", rid="r\x1fs"))


def test_more_requests_than_are_taken(manager: TokenizerManager, sent: Sent) -> None:
    first, _ = [ask(manager, sent, text="a") for _ in range(2)]
    with pytest.raises(QueueFull, match="The request queue is full") as caught:
        manager.generate(GenerateReqInput(text="a"))
    assert caught.value.status == 503
    manager.handle(answer(sent.requests()[0].rid))
    assert first.result(300).text == "x"
    ask(manager, sent, text="a")


def test_orders_reach_requests_of_other_frontends(manager: TokenizerManager, sent: Sent) -> None:
    manager.abort("r")
    manager.abort("job", prefix=True)
    manager.abort(None)
    assert [(one.rid, one.prefix, one.abort_all) for one in sent.items if isinstance(one, AbortReq)] == [
        ("r\x1f", True, False), ("job", True, False), ("", False, True),
    ]  # fmt: skip


def test_what_failed_here_is_cancelled_there(manager: TokenizerManager, sent: Sent) -> None:
    asked = ask(manager, sent, text="a")
    (request,) = sent.requests()
    fault = InternalFault("the detokeniser dropped it")
    manager.handle(answer(request.rid, "", FinishReason("abort", error=fault.to_dict())))
    with pytest.raises(InternalFault, match="dropped it"):
        asked.result(300)
    assert AbortReq(rid=request.rid) in sent.items


def test_a_failed_group_is_everybodys_error(tokenizer: Tokenizer, sent: Sent) -> None:
    manager = TokenizerManager(Preparer(tokenizer, None, Limits(VOCAB, 64, 64)), sent)

    async def go() -> None:
        tasks = [
            asyncio.create_task(manager.submit(GenerateReqInput(text="a"))),
            asyncio.create_task(manager.submit_batch(GenerateReqInput(text=["b"]))),
            asyncio.create_task(manager.control_async(GetStateReq(), 10.0)),
            asyncio.create_task(manager.embed(EmbeddingReqInput(text="c"))),
        ]
        while len(sent.items) < 4:
            await asyncio.sleep(0.002)
        manager.handle(GroupFailed(message="the scheduler was killed by signal 9", where="scheduler"))
        done = await asyncio.gather(*tasks, return_exceptions=True)
        faults: list[Any] = [one[0] if isinstance(one, list) else one for one in done]
        assert [type(fault) for fault in faults] == [EngineDead] * 4
        assert all("signal 9" in str(fault) and fault.where == "scheduler" for fault in faults)
        with pytest.raises(EngineDead, match="signal 9"):
            await manager.submit(GenerateReqInput(text="a"))
        with pytest.raises(EngineDead, match="signal 9"):
            manager.batch(GenerateReqInput(text=["a"]))

    asyncio.run(go())
    assert manager.live == 0


def test_questions_have_a_deadline(manager: TokenizerManager, sent: Sent) -> None:
    with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
        manager.control(GetStateReq(), 0.01)
    late = sent.items[-1]
    manager.handle(ControlOutput(rid=late.rid, ok=True))

    async def go() -> None:
        with pytest.raises(DeadlineExceeded):
            await manager.control_async(GetStateReq(), 0.01)

    asyncio.run(go())


def test_a_request_nobody_answers_ends_after_its_deadline(
    manager: TokenizerManager, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime.processes.frontend.request_state.GRACE_S", 0.01)
    outcomes = manager.batch(GenerateReqInput(text=["a"], timeout_s=0.01))
    assert isinstance(outcomes[0], DeadlineExceeded)
    assert isinstance(sent.items[-1], AbortReq)

    async def go() -> None:
        with pytest.raises(DeadlineExceeded):
            await manager.submit(GenerateReqInput(text="a", timeout_s=0.01))

    asyncio.run(go())
    assert manager.live == 0


def test_encoders_do_not_generate(tokenizer: Tokenizer, sent: Sent) -> None:
    info = ModelInfo(path="x", served_name="bert", is_generation=False)
    manager = TokenizerManager(Preparer(tokenizer, None, Limits(VOCAB, 64, 64)), sent, model=info)
    for wrong in (lambda: manager.generate(GenerateReqInput(text="a")),
                  lambda: manager.batch(GenerateReqInput(text=["a"]))):  # fmt: skip
        with pytest.raises(BadRequest, match="bert computes vectors"):
            wrong()
    assert manager.model is info
    assert not sent.items


# -- vectors -------------------------------------------------------------------------------------------------


def test_vectors_come_in_order_with_the_users_ids(manager: TokenizerManager, sent: Sent) -> None:
    async def go() -> list[EmbeddingOutput]:
        task = asyncio.create_task(
            manager.embed(EmbeddingReqInput(text=["a", "the dog"], rid="e", dimensions=2))
        )
        while len(sent.items) < 2:
            await asyncio.sleep(0.002)
        requests: list[TokenizedEmbeddingReqInput] = list(sent.items)
        assert all(one.dimensions == 2 and one.http_worker_ipc == "worker-1" for one in requests)
        assert requests[1].input_ids == manager.tokenizer.encode("the dog")
        for one, vector in zip(reversed(requests), ([0.5], [0.25]), strict=True):
            manager.handle(
                BatchEmbeddingOutput(rids=[one.rid], outputs=[EmbeddingOutput(one.rid, vector, 3)])
            )
        return await task

    found = asyncio.run(go())
    assert [(one.rid, one.embedding) for one in found] == [("e_0", [0.25]), ("e_1", [0.5])]
    assert manager.live == 0


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"text": ""}, "text"),
        ({"text": "the dog " * 100}, "text"),
        ({"input_ids": [VOCAB]}, "input_ids[0]"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "dimensions": 0}, "dimensions"),
        ({"text": "a", "timeout_s": 0}, "timeout_s"),
        ({"text": "a", "rid": ""}, "rid"),
    ],
)
def test_wrong_requests_for_vectors(
    manager: TokenizerManager, sent: Sent, fields: dict[str, Any], where: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        asyncio.run(manager.embed(EmbeddingReqInput(**fields)))
    assert caught.value.where == where
    assert not sent.items


def test_a_vector_that_fails_and_one_that_is_not_waited_for(manager: TokenizerManager, sent: Sent) -> None:
    async def go() -> None:
        task = asyncio.create_task(manager.embed(EmbeddingReqInput(text=["a", "b"])))
        while len(sent.items) < 2:
            await asyncio.sleep(0.002)
        rid = sent.items[0].rid
        reason = FinishReason("abort", error=InternalFault("no numbers").to_dict())
        manager.handle(BatchEmbeddingOutput(rids=[rid], outputs=[EmbeddingOutput(rid, [], finish=reason)]))
        rid = sent.items[1].rid
        manager.handle(BatchEmbeddingOutput(rids=[rid], outputs=[EmbeddingOutput(rid, [1.0])]))
        failed, well = await task
        assert isinstance(failed, InternalFault)
        assert "no numbers" in str(failed)
        assert isinstance(well, EmbeddingOutput)
        assert well.embedding == [1.0]
        task = asyncio.create_task(manager.embed(EmbeddingReqInput(text="c")))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert manager.live == 0


# -- what is told --------------------------------------------------------------------------------------------


class Diary:
    """An observer that writes everything down."""

    def __init__(self) -> None:
        self.lines: list[tuple[Any, ...]] = []

    def on_begin(self, request: Begun) -> None:
        self.lines.append(("begin", request.rid, request.prompt_tokens, dict(request.labels)))

    def on_first_token(self, request: Begun, seconds: float) -> None:
        self.lines.append(("first", request.rid))

    def on_tokens(self, request: Begun, count: int, seconds: float) -> None:
        self.lines.append(("tokens", request.rid, count))

    def on_finish(self, request: Begun, meta: Mapping[str, Any], seconds: float) -> None:
        self.lines.append(("finish", request.rid, meta["completion_tokens"], meta["finish_reason"]["type"]))

    def on_abort(self, request: Begun, fault: RuntimeFault | None, seconds: float) -> None:
        self.lines.append(("abort", request.rid, None if fault is None else fault.code))


def test_observers_hear_each_event_once(pipeline: Pipeline) -> None:
    diary = Diary()
    pipeline.manager.observe(diary)

    async def go() -> None:
        request = GenerateReqInput(
            text="the dog", rid="r", sampling_params={"max_new_tokens": 3}, custom_labels={"team": "x"}
        )
        _ = [output async for output in pipeline.manager.stream(request)]
        await pipeline.manager.submit(GenerateReqInput(text="a", log_metrics=False))
        task = asyncio.create_task(
            pipeline.manager.submit(GenerateReqInput(text="b", rid="left", sampling_params=ENDLESS))
        )
        while pipeline.manager.live < 1:
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        doomed = asyncio.create_task(
            pipeline.manager.submit(GenerateReqInput(text="b", rid="doomed", sampling_params=ENDLESS))
        )
        while pipeline.manager.live < 1:
            await asyncio.sleep(0.002)
        pipeline.manager.abort("doomed")
        await asyncio.gather(doomed, return_exceptions=True)

    asyncio.run(go())
    prompt = len(pipeline.model.tokenizer.encode("the dog"))
    own = [line for line in diary.lines if line[1] == "r"]
    assert own[0] == ("begin", "r", prompt, {"team": "x"})
    assert own[1] == ("first", "r")
    assert own[-1] == ("finish", "r", 3, "length")
    assert 1 + sum(line[2] for line in own if line[0] == "tokens") <= 3
    assert [line for line in diary.lines if line[1] == "left" and line[0] == "abort"] == [
        ("abort", "left", None)
    ]
    assert [line for line in diary.lines if line[1] == "doomed" and line[0] == "abort"] == [
        ("abort", "doomed", "aborted")
    ]
    assert {line[1] for line in diary.lines} == {"r", "left", "doomed"}


def test_meta_has_the_public_names(pipeline: Pipeline) -> None:
    request = GenerateReqInput(
        text="the dog sleeps", rid="m", sampling_params={"max_new_tokens": 2, "seed": 1}, return_logprob=True,
        logprob_start_len=0, top_logprobs_num=2, return_text_in_logprobs=True, return_prompt_token_ids=True,
    )  # fmt: skip
    output = asyncio.run(pipeline.manager.submit(request))
    ids, meta = pipeline.model.tokenizer.encode("the dog sleeps"), output.meta
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"]) == ("m", len(ids), 2)
    assert meta["finish_reason"] == {"type": "length", "length": 2}
    assert meta["prompt_token_ids"] == ids
    assert meta["input_token_logprobs"][0][:2] == [None, ids[0]]
    assert [entry[1] for entry in meta["input_token_logprobs"]] == ids
    assert "".join(entry[2] for entry in meta["input_token_logprobs"]) == "the dog sleeps"
    assert [entry[1] for entry in meta["output_token_logprobs"]] == output.output_ids
    assert all(entry[0] <= 0 for entry in meta["output_token_logprobs"])
    assert [len(entry) for entry in meta["output_top_logprobs"]] == [2, 2]
    for name in ("cached_tokens", "reasoning_tokens", "num_retractions", "e2e_latency", "queue_time",
                 "first_token_latency", "jumped_tokens", "decode_steps", "weight_version"):  # fmt: skip
        assert name in meta
    plain = asyncio.run(
        pipeline.manager.submit(GenerateReqInput(text="a", sampling_params={"max_new_tokens": 1}))
    )
    assert not any("logprob" in name for name in plain.meta)


def test_thoughts_are_counted(tokenizer_files: dict[str, dict[str, Any]], sent: Sent) -> None:
    data = dict(tokenizer_files["byte level"])
    added = [
        {"id": 500 + at, "content": text, "special": False, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for at, text in enumerate(("<think>", "</think>"))
    ]  # fmt: skip
    data["added_tokens"] = [*data["added_tokens"], *added]
    tokenizer = Tokenizer(data, {}, VOCAB)
    opening, closing = tokenizer.added_id("<think>"), tokenizer.added_id("</think>")
    assert opening is not None
    assert closing is not None
    marks = marks_of("auto", tokenizer.added_id, tokenizer.encode)
    manager = TokenizerManager(Preparer(tokenizer, None, Limits(VOCAB, 64, 64), marks=marks), sent)
    cases = [([opening, 7, closing, 8], 3), ([opening, 7, 8], 3), ([7, closing], 0), ([], 0)]
    for ids, count in cases:
        asked = ask(manager, sent, text="a")
        rid = sent.requests()[-1].rid
        for token in ids:
            manager.handle(BatchStrOutput(rids=[rid], outputs=[TokenOutput(rid, [token])]))
        end = TokenOutput(rid, [], finish=FinishReason("stop"))
        manager.handle(BatchStrOutput(rids=[rid], outputs=[end]))
        assert asked.result(300).meta["reasoning_tokens"] == count


def test_a_slow_reader_gets_all_in_fewer_pieces(manager: TokenizerManager, sent: Sent) -> None:
    async def go() -> list[GenerateOutput]:
        stream = manager.stream(GenerateReqInput(text="a", return_logprob=True))
        first = asyncio.ensure_future(anext(stream))
        while not sent.items:
            await asyncio.sleep(0.002)
        rid = sent.requests()[0].rid
        manager.handle(answer(rid, "a", None, output_logprobs=[-1.0]))
        got = [await first]
        for text in "bcd":
            manager.handle(answer(rid, text, None, output_logprobs=[-2.0]))
        last = TokenOutput(rid, [6, 7], replaced=1, output_logprobs=[-3.0, -4.0], finish=FinishReason("stop"))
        manager.handle(BatchStrOutput(rids=[rid], outputs=[msgspec.structs.replace(last, text="e")]))
        return got + [output async for output in stream]

    outputs = asyncio.run(go())
    assert [output.text for output in outputs] == ["a", "bcde"]
    assert [output.output_ids for output in outputs] == [[5], [5, 5, 6, 7]]
    values = [[entry[0] for entry in output.meta["output_token_logprobs"]] for output in outputs]
    assert values == [[-1.0], [-2.0, -2.0, -3.0, -4.0]]
    assert [output.meta["output_token_logprobs_length"] for output in outputs] == [1, 5]


def test_what_was_handed_out_is_taken_back(manager: TokenizerManager, sent: Sent) -> None:
    async def go(cumulative: bool) -> list[OutputDelta]:
        stream = manager.stream(GenerateReqInput(text="a", return_logprob=True), cumulative=cumulative)
        first = asyncio.ensure_future(anext(stream))
        before = len(sent.items)
        while len(sent.items) == before:
            await asyncio.sleep(0.002)
        rid = sent.requests()[-1].rid
        manager.handle(answer(rid, "a", None, output_logprobs=[-1.0]))
        got = [await first]
        last = TokenOutput(rid, [6, 7], replaced=1, output_logprobs=[-3.0, -4.0], finish=FinishReason("stop"))
        manager.handle(BatchStrOutput(rids=[rid], outputs=[msgspec.structs.replace(last, text="e")]))
        return got + [output async for output in stream]

    for cumulative in (False, True):
        first, last = asyncio.run(go(cumulative))
        assert (first.output_ids, first.replaced) == ([5], 0)
        assert last.output_ids == [6, 7]
        assert (last.text, last.replaced) == (("ae", 0) if cumulative else ("e", 1))
        assert last.meta["output_token_logprobs_length"] == 2


def test_limits_name_both_numbers(tokenizer: Tokenizer) -> None:
    preparer = Preparer(tokenizer, None, Limits(VOCAB, 64, 1000))
    with pytest.raises(PromptTooLong, match=r"70 tokens; the context length is 64"):
        preparer.prepare(GenerateReqInput(input_ids=[5] * 70))
    with pytest.raises(PromptTooLong, match=r"110 tokens .*10 in the prompt and 100 new.* is 64"):
        preparer.prepare(GenerateReqInput(input_ids=[5] * 10, sampling_params={"max_new_tokens": 100}))
    cutting = Preparer(tokenizer, None, Limits(VOCAB, 64, 1000, auto_truncate=True))
    for size, params in itertools.product((10, 63, 64, 70), (SamplingParams(max_new_tokens=100), None)):
        (made,) = cutting.prepare(GenerateReqInput(input_ids=[5] * size, sampling_params=params)).requests
        assert 0 < len(made.input_ids) <= 63
        assert len(made.input_ids) + made.sampling_params.max_new_tokens <= 64
        assert made.sampling_params.max_new_tokens >= 1


def test_a_message_of_the_user_is_named_when_wrong(pipeline: Pipeline) -> None:
    with pytest.raises(BadRequest) as caught:
        pipeline.manager.generate(
            GenerateReqInput(messages=[Message(role=5, content="a")]),  # type: ignore[arg-type]
        )
    assert caught.value.where == "messages[0].role"
