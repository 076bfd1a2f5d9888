"""A deadline crosses to the scheduler as the time that is left: two machines have no clock in common."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest

from runtime.config.scheduler import SchedulerConfig
from runtime.ipc.address import Address
from runtime.ipc.wire import PIPELINE
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.frontend.prepare import Preparer
from runtime.processes.frontend.prompt import Limits
from runtime.processes.frontend.tokenizer_manager import TokenizerManager
from runtime.protocol.errors import EngineDead
from runtime.protocol.io_struct import EmbeddingReqInput, GenerateReqInput, TokenOutput
from runtime.protocol.model_info import ModelInfo
from runtime.protocol.vocabulary import Vocabulary
from runtime.scheduler.embedding_scheduler import EmbeddingLoop, EmbeddingScheduler, TextLimits
from runtime.scheduler.loop import Loop
from runtime.scheduler.scheduler import Scheduler
from tests.unit.runtime.scheduler.fake import FakeRunner

VOCAB = 512
OFFSETS = [-1e6, 0.0, 1e6]
LONG_S = 300.0


@pytest.fixture(scope="module")
def tokenizer(tokenizer_files: dict[str, dict[str, Any]]) -> Tokenizer:
    return Tokenizer(tokenizer_files["byte level"], {}, VOCAB)


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def sent(tokenizer: Tokenizer, request: GenerateReqInput | EmbeddingReqInput) -> Any:
    """What reaches the other machine of it."""
    box = Address.memory()
    embeds = isinstance(request, EmbeddingReqInput)
    manager = TokenizerManager(
        Preparer(tokenizer, None, Limits(VOCAB, 4096, 4096)),
        box.outbox(),
        model=ModelInfo(path="x", served_name="x", is_generation=not embeds),
    )

    def ask() -> None:
        embeds = isinstance(request, EmbeddingReqInput)
        run = (lambda: asyncio.run(manager.embed(request))) if embeds else partial(manager.generate, request)
        with pytest.raises(EngineDead):
            run()

    thread = threading.Thread(target=ask)
    thread.start()
    (item,) = box.inbox().receive(LONG_S)
    manager.fail_all(EngineDead("enough"))
    thread.join()
    return PIPELINE.decode(PIPELINE.encode(item))


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_request_has_its_time_whatever_the_schedulers_clock_says(
    tokenizer: Tokenizer, offset: float
) -> None:
    item = sent(
        tokenizer,
        GenerateReqInput(text="the", sampling_params={"max_new_tokens": 4000}, timeout_s=3600.0),
    )
    clock, runner = Clock(offset + 5000.0), FakeRunner(8192, VOCAB)
    scheduler = Scheduler(
        SchedulerConfig(),
        slots=8192,
        vocabulary=Vocabulary(tuple(b"a" for _ in range(VOCAB)), frozenset()),
        encode=lambda text: [],
        grammar=None,
        verify_params=runner.verify,
        clock=clock,
    )
    loop = Loop(scheduler, runner, overlap=False)
    scheduler.add(item)
    outputs: list[TokenOutput] = []
    for passed, over in ((1.0, False), (3400.0, False), (300.0, True)):
        clock.now += passed
        outputs += loop.step()
        ends = [output.finish for output in outputs if output.finish is not None]
        assert bool(ends) is over, (passed, ends)
    assert ends[0].error is not None
    assert ends[0].error["code"] == "deadline_exceeded"


@pytest.mark.parametrize("offset", OFFSETS)
def test_so_has_a_vector(tokenizer: Tokenizer, offset: float) -> None:
    item = sent(tokenizer, EmbeddingReqInput(text="the", timeout_s=3600.0))
    clock = Clock(offset + 5000.0)
    limits = TextLimits(vocab_size=VOCAB, positions=64, kinds=1, width=4, scores=False)
    scheduler = EmbeddingScheduler(SchedulerConfig(), limits, clock=clock)
    scheduler.embed(item)
    scheduler.pause("in_place")  # nobody computes it
    loop = EmbeddingLoop(scheduler, FakeRunner(1, VOCAB))
    clock.now += 3500.0
    assert loop.step() == []
    clock.now += 200.0
    (output,) = loop.step()
    assert output.finish is not None
    assert output.finish.error is not None
    assert output.finish.error["code"] == "deadline_exceeded"


def test_what_passes_before_it_is_sent_counts(tokenizer: Tokenizer) -> None:
    """Templates, tokenizing, the commit of a prompt that several samples share."""
    preparer = Preparer(tokenizer, None, Limits(VOCAB, 64, 64), Clock(100.0))
    job = preparer.prepare(GenerateReqInput(text="the", timeout_s=10.0))
    assert job.deadline == 110.0
    assert job.requests[0].time_left_s is None
    late = sent(tokenizer, GenerateReqInput(text="the " * 200, timeout_s=3600.0))
    assert 0 < late.time_left_s < 3600.0
