"""Engine against transformers, and its promises: batches, caches, constraints, choices, streams, threads."""

from __future__ import annotations

import asyncio
import gc
import itertools
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from runtime.api import Engine
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import Aborted, BadRequest, EngineDead
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROOT = Path(__file__).resolve().parents[4]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=24)
PROMPTS = [
    "The quick brown fox",
    "She said:",
    "안녕하세요 🦊",
    "The quick brown fox jumps over the lazy dog. Well,",
    'the {"name": 3 + 4',
]


@torch.no_grad()
def greedy(reference: PreTrainedModel, ids: list[int], count: int) -> list[int]:
    out = reference.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=count, do_sample=False,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return [int(token) for token in out[0, len(ids) :]]


@torch.no_grad()
def logprobs(reference: PreTrainedModel, ids: Sequence[int], start: int) -> list[float]:
    """Of ids[start:], each given those before it."""
    scores = torch.log_softmax(reference(torch.tensor([list(ids)])).logits[0].float(), -1)
    return [float(scores[at - 1, ids[at]]) for at in range(start, len(ids))]


@pytest.mark.parametrize("runner_process", [False, True])
def test_an_engine_that_nobody_holds_ends(checkpoint: Path, runner_process: bool) -> None:
    before = {thread.ident for thread in threading.enumerate()}
    options: dict[str, Any] = {"device": "cpu", "max_total_tokens": 512, "runner_process": runner_process}
    engine = Engine(str(checkpoint), **options)
    engine.generate("The quick", {"max_new_tokens": 2})
    own = [thread for thread in threading.enumerate() if thread.ident not in before]
    assert any(thread.name == "sglang-dsl-scheduler" for thread in own)
    # Who reads a stream holds what it comes from.
    texts = engine.generate("The quick", {"max_new_tokens": 8, "ignore_eos": True}, stream=True)
    engine = None  # type: ignore[assignment]
    gc.collect()
    assert [one.meta["completion_tokens"] for one in texts][-1] == 8
    del texts
    gc.collect()
    for thread in own:
        thread.join(60)
    assert [thread.name for thread in own if thread.is_alive()] == []


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_is_what_transformers_generates(
    engine: Engine, reference: PreTrainedModel, prompt: str
) -> None:
    output = engine.generate(prompt, GREEDY)
    expected = greedy(reference, engine.encode(prompt), 24)
    assert output.output_ids == expected
    assert output.text == engine.decode(expected)
    assert output.meta["completion_tokens"] == len(expected)
    assert output.meta["prompt_tokens"] == len(engine.encode(prompt))


def test_a_batch_gives_what_single_calls_give_in_order(engine: Engine) -> None:
    singles = [engine.generate(prompt, GREEDY) for prompt in PROMPTS]
    engine.flush_cache()
    batch = engine.generate(PROMPTS, GREEDY)
    assert [output.text for output in batch] == [output.text for output in singles]
    ids = engine.generate(
        [engine.encode(prompt) for prompt in PROMPTS], {"temperature": 0, "max_new_tokens": 24}
    )
    assert [output.text for output in ids] == [output.text for output in singles]
    assert engine.generate(engine.encode(PROMPTS[0]), GREEDY).text == singles[0].text
    assert engine.generate([], GREEDY) == []
    named = engine.generate(
        sampling_params=GREEDY, input_ids=[engine.encode(prompt) for prompt in PROMPTS[:2]]
    )
    assert [output.text for output in named] == [output.text for output in singles[:2]]
    assert engine.generate(text=PROMPTS[0], sampling_params=GREEDY).text == singles[0].text
    with pytest.raises(BadRequest, match="Either text, input_ids or input_embeds"):
        engine.generate(sampling_params=GREEDY)
    own = engine.generate(PROMPTS[:2], [{"max_new_tokens": 1}, {"max_new_tokens": 2, "ignore_eos": True}])
    assert [output.meta["completion_tokens"] for output in own] == [1, 2]


def test_the_second_run_finds_its_prefix_cached(engine: Engine) -> None:
    engine.flush_cache()
    prompt = PROMPTS[3]
    first, second = engine.generate(prompt, GREEDY), engine.generate(prompt, GREEDY)
    assert first.meta["cached_tokens"] == 0
    assert second.meta["cached_tokens"] == first.meta["prompt_tokens"] - 1
    assert first.text == second.text
    other = engine.generate(prompt, GREEDY, extra_key="tenant")
    assert other.meta["cached_tokens"] == 0
    assert engine.flush_cache()
    assert engine.generate(prompt, GREEDY).meta["cached_tokens"] == 0


def test_committing_a_prompt_warms_the_cache(engine: Engine) -> None:
    engine.flush_cache()
    output = engine.generate(PROMPTS[3], {"max_new_tokens": 0})
    assert (output.text, output.output_ids) == ("", [])
    assert engine.generate(PROMPTS[3], GREEDY).meta["cached_tokens"] > 0


@pytest.mark.parametrize(
    "regex",
    [
        r"\d{3}-\d{4}",
        r"(yes|no|maybe)",
        r" [a-z]{1,4}(, [a-z]{1,4}){2}\.",
        r"[가-힣]{2,4}",
        r'\{"name": "[a-z]{1,5}"\}',
    ],
)
@pytest.mark.parametrize("jump", [False, True])
def test_constrained_text_matches_its_regex_and_temperature_does_not_matter(
    engine: Engine, regex: str, jump: bool
) -> None:
    for seed in range(3):
        output = engine.generate(
            "The", {"temperature": 1.0, "seed": seed, "max_new_tokens": 120},
            constraint=Constraint("regex", regex), jump_forward=jump,
        )  # fmt: skip
        assert re.fullmatch(regex, output.text)
        assert output.meta["finish_reason"]["type"] == "stop"
        assert jump or output.meta["jumped_tokens"] == 0


def test_jump_forward_takes_fewer_steps_for_text_with_one_continuation(engine: Engine) -> None:
    fixed = Constraint("regex", "The quick brown fox jumps over the lazy dog")
    slow = engine.generate("She said:", GREEDY, constraint=fixed, jump_forward=False)
    fast = engine.generate("She said:", GREEDY, constraint=fixed)
    assert slow.text == fast.text == "The quick brown fox jumps over the lazy dog"
    assert fast.meta["jumped_tokens"] > 0
    assert fast.meta["decode_steps"] < slow.meta["decode_steps"]


@pytest.mark.parametrize("prompt", ["The quick", "", "The lazy do", "She said: "])
def test_choice_scores_are_transformers_logprobs(
    engine: Engine, reference: PreTrainedModel, prompt: str
) -> None:
    options = [" brown fox", "g", " brown", "gs sleep", "brown"]
    output = engine.generate(prompt, choices=options, unconditional=True)
    assert output.choices is not None
    assert [choice.text for choice in output.choices] == options
    for option, choice in zip(options, output.choices, strict=True):
        whole = engine.encode(prompt + option)
        assert choice.token_ids == whole[len(whole) - len(choice.token_ids) :]
        start = [0 if not engine.vocabulary.eos else min(engine.vocabulary.eos)]
        given = whole if len(whole) > len(choice.token_ids) else [*start, *whole]
        expected = logprobs(reference, given, len(given) - len(choice.token_ids))
        assert choice.logprobs == pytest.approx(expected, abs=1e-3)
        alone = [*start, *choice.token_ids]
        assert choice.unconditional == pytest.approx(logprobs(reference, alone, 1), abs=1e-3)


def test_options_share_their_prompt(engine: Engine) -> None:
    engine.flush_cache()
    prompt = PROMPTS[3] * 4
    before = engine.state()["computed"]
    options = [f" {number}" for number in range(8)]
    output = engine.generate(prompt, choices=options)
    computed = engine.state()["computed"] - before
    assert output.meta["prompt_tokens"] > 8 * len(engine.encode(prompt))
    assert computed < 2 * len(engine.encode(prompt))


def test_logprobs_of_prompt_and_output(engine: Engine, reference: PreTrainedModel) -> None:
    ids = engine.encode(PROMPTS[3])
    output = engine.generate(ids, GREEDY, return_logprob=True, logprob_start_len=0, top_logprobs_num=2)
    prompt = output.meta["input_token_logprobs"]
    assert prompt[0] == [None, ids[0], None]
    assert [entry[1] for entry in prompt] == ids
    values = [entry[0] for entry in prompt[1:]]
    assert values == pytest.approx(logprobs(reference, ids, 1), abs=1e-3)
    whole = [*ids, *output.output_ids]
    made = output.meta["output_token_logprobs"]
    assert [entry[1] for entry in made] == output.output_ids
    assert [entry[0] for entry in made] == pytest.approx(logprobs(reference, whole, len(ids)), abs=1e-3)
    tops = output.meta["output_top_logprobs"]
    assert [top[0][1] for top in tops] == output.output_ids
    assert all(len(top) == 2 and top[0][0] >= top[1][0] for top in tops)
    scored = engine.generate(ids, {"max_new_tokens": 0}, return_logprob=True)  # nothing else can be meant
    assert [entry[1] for entry in scored.meta["input_token_logprobs"]] == ids
    spelled = engine.generate(ids, GREEDY, return_logprob=True, return_text_in_logprobs=True)
    assert "".join(entry[2] for entry in spelled.meta["output_token_logprobs"]).startswith(spelled.text)


def test_turns_go_through_the_checkpoints_template(engine: Engine) -> None:
    messages = [Message("user", "the dog"), Message("assistant", "Well, ", open=True)]
    by_turns = engine.generate(GenerateReqInput(messages=messages), GREEDY)
    text = "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\nWell, "
    assert by_turns.text == engine.generate(text, GREEDY).text
    assert by_turns.meta["prompt_tokens"] == len(engine.encode(text))


def a_stop(text: str) -> str:
    """Two letters from the inside of `text`."""
    found = re.search(r"[a-z]{2}", text[4:])
    assert found is not None
    return found[0]


def test_stop_strings_are_cut_unless_asked_for(engine: Engine) -> None:
    whole = engine.generate(PROMPTS[0], GREEDY).text
    stop = a_stop(whole)
    params = {"temperature": 0, "max_new_tokens": 24, "stop": stop}
    cut = engine.generate(PROMPTS[0], params)
    assert cut.text == whole[: whole.index(stop)]
    assert cut.meta["finish_reason"] == {"type": "stop", "matched": stop}
    kept = engine.generate(
        PROMPTS[0], {"temperature": 0, "max_new_tokens": 24, "stop": stop, "no_stop_trim": True}
    )
    assert kept.text.startswith(cut.text + stop)
    assert whole.startswith(kept.text)


def test_a_stream_adds_up_to_the_whole(engine: Engine) -> None:
    async def collect(request: GenerateReqInput) -> list[GenerateOutput]:
        return [output async for output in engine.stream(request)]

    whole = engine.generate(PROMPTS[2], GREEDY)
    for stop in ((), (a_stop(whole.text),)):
        params = SamplingParams(temperature=0.0, max_new_tokens=24, stop=stop)
        expected = engine.generate(PROMPTS[2], params)
        parts = asyncio.run(collect(GenerateReqInput(text=PROMPTS[2], sampling_params=params)))
        assert all(b.text.startswith(a.text) for a, b in itertools.pairwise(parts))
        assert parts[-1].text == expected.text
        assert parts[-1].output_ids == expected.output_ids
        assert parts[-1].meta["finish_reason"] == expected.meta["finish_reason"]


def test_two_loops_and_threads_at_once(engine: Engine) -> None:
    expected = [engine.generate(prompt, GREEDY).text for prompt in PROMPTS]

    def by_loop() -> list[str]:
        async def gather() -> list[GenerateOutput]:
            requests = [GenerateReqInput(text=prompt, sampling_params=GREEDY) for prompt in PROMPTS]
            return list(await asyncio.gather(*(engine.submit(request) for request in requests)))

        return [output.text for output in asyncio.run(gather())]

    def by_thread() -> list[str]:
        return [output.text for output in engine.generate(PROMPTS, GREEDY)]

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ask) for ask in (by_loop, by_loop, by_thread, by_thread)]
        for job in jobs:
            assert job.result(300) == expected


def test_cancelling_and_aborting_free_everything(engine: Engine, pace: Any) -> None:
    endless = SamplingParams(max_new_tokens=400, ignore_eos=True)
    pace.hold()

    async def cancel() -> None:
        tasks = [
            asyncio.create_task(engine.submit(GenerateReqInput(text=prompt, sampling_params=endless)))
            for prompt in PROMPTS
        ]
        while not engine.state()["live"]:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in done)

    asyncio.run(cancel())

    def abort() -> None:
        while not engine.state()["running"]:
            time.sleep(0.001)
        engine.abort()

    killer = threading.Thread(target=abort)
    killer.start()
    with pytest.raises(Aborted):
        engine.generate(PROMPTS[0], endless)
    killer.join()
    state = engine.state()
    assert (state["running"], state["waiting"], state["live"]) == (0, 0, 0)
    assert engine.flush_cache()
    assert engine.state()["free"] == engine.state()["slots"]


def test_closing(checkpoint: Path) -> None:
    engine = Engine(str(checkpoint), device="cpu", max_total_tokens=512)
    assert engine.generate("a", GREEDY).output_ids
    engine.close()
    engine.close()
    calls: list[Any] = [lambda: engine.generate("a"), engine.state, engine.flush_cache]
    for call in calls:
        with pytest.raises(EngineDead):
            call()


LEFT_RUNNING = """
import sys, threading, time
from runtime.api import Engine
engine = Engine(sys.argv[1], device="cpu", max_total_tokens=2048)
request = {"max_new_tokens": 400, "ignore_eos": True}
def generate():
    while True:
        engine.generate(["a"] * 8, request)
threading.Thread(target=generate, daemon=True).start()
while not engine.state()["running"]:
    time.sleep(0.01)
print("leaving")
"""


def test_a_program_may_end_while_the_engine_generates(checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEFT_RUNNING, str(checkpoint)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr
