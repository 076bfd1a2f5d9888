"""What every backend keeps: the verbs of Backend, seen through programs and directly."""

from __future__ import annotations

import asyncio
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import sglang_dsl as sgl
from runtime.protocol.constraint import Constraint
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams
from sglang_dsl import Timeout, Unsupported, gen, select
from sglang_dsl.backends import BACKENDS, NEED_A_MODEL
from sglang_dsl.backends.base import Backend, Call, ChoiceCall, Prompt
from sglang_dsl.concurrency.loop import background

WAIT_S = 300.0


@contextmanager
def make(name: str) -> Iterator[Backend]:
    """The backend under its name, as small as it can be; skips where its model is not there."""
    if name == "mock":
        yield BACKENDS.load(name)()
        return
    runtime = pytest.importorskip("runtime", reason="the runtime is not installed")
    weights = Path(str(runtime.__file__)).parent / "pocket" / "checkpoint" / "model.safetensors"
    if not weights.exists():
        pytest.skip("the bundled checkpoint is not there yet")
    try:
        importlib.import_module("runtime.api")
    except ImportError as error:
        pytest.skip(f"the engine's packages are not installed: {error}")
    # In bfloat16 a score depends a little on what else is computed along with it.
    small: Any = {"max_total_tokens": 4096, "max_running_requests": 16, "dtype": "float32"}
    if name == "endpoint":
        with sgl.Runtime("pocket", threads=1, **small) as served:
            yield served.endpoint
    else:
        yield BACKENDS.load(name)("pocket", **small)


# What talks to other people's APIs is asked in test_remote_backends.py.
OURS = [name for name in BACKENDS.names() if name not in NEED_A_MODEL]


@pytest.fixture(scope="module", params=OURS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    with make(request.param) as made:
        yield made
        run(made.aclose())


def run(work: Any) -> Any:
    return background().run(work, WAIT_S)


def raw(text: str) -> Prompt:
    return Prompt((Message("raw", text, open=True),))


def turns(*said: str, prefix: str = "") -> Prompt:
    roles = ("user", "assistant")
    closed = [Message(roles[i % 2], text) for i, text in enumerate(said)]
    return Prompt((*closed, Message("assistant", prefix, open=True)))


def greedy(tokens: int = 8, **words: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, temperature=0.0, **words)


async def collect(backend: Backend, call: Call) -> tuple[list[str], list[Any]]:
    deltas = [delta async for delta in backend.stream(call)]
    return [d.text for d in deltas], [d.meta for d in deltas]


PROMPTS = [
    raw("Once there was"),
    turns("Which river runs through Ostrel?"),
    turns("Hello", "Hi.", "And?", prefix="Well, "),
    Prompt(
        (Message("system", "Be brief."), Message("user", " spaces \n"), Message("assistant", "", open=True))
    ),
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_stream_adds_up_to_the_whole_text(backend: Backend, prompt: Prompt) -> None:
    call = Call(prompt, greedy(12))
    done = run(backend.generate(call))
    pieces, metas = run(collect(backend, call))
    assert len(done.texts) == 1
    assert "".join(pieces) == done.texts[0]
    assert metas[-1]["finish_reason"] == done.meta["finish_reason"]
    assert metas[-1]["completion_tokens"] == done.meta["completion_tokens"]
    assert all(meta is None for meta in metas[:-1])


def test_usage_is_counted(backend: Backend) -> None:
    short = run(backend.generate(Call(raw("one two"), greedy(3)))).meta
    long = run(backend.generate(Call(raw("one two " * 10), greedy(3)))).meta
    assert 0 < short["prompt_tokens"] < long["prompt_tokens"]
    assert 0 < short["completion_tokens"] <= 3
    assert short["id"] != long["id"]


def test_the_token_limit_holds(backend: Backend) -> None:
    done = run(backend.generate(Call(raw("Words and words"), greedy(1, ignore_eos=True))))
    assert done.meta["completion_tokens"] <= 1
    assert done.meta["finish_reason"]["type"] in ("length", "stop")


def test_a_stop_string_ends_the_text_and_is_left_out(backend: Backend) -> None:
    call = Call(turns("Which river runs through Ostrel?"), greedy(12))
    text = run(backend.generate(call)).texts[0]
    assert len(text) > 3
    stop = text[2:4]
    done = run(backend.generate(Call(call.prompt, greedy(12, stop=(stop,)))))
    assert done.texts[0] == text[: text.index(stop)]
    assert done.meta["finish_reason"] == {"type": "stop", "matched": stop}
    pieces, _ = run(collect(backend, Call(call.prompt, greedy(12, stop=(stop,)))))
    assert "".join(pieces) == done.texts[0]


REGEXES = [
    r"[0-9]{4}",
    r"(yes|no|perhaps)",
    r"[A-Z][a-z]+ [a-z]{2,5}\.",
    r'\{"a": [1-9], "b": "[xyz]{3}"\}',
    r"é+ü?",
]


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_regex_is_kept(backend: Backend, regex: str, temperature: float) -> None:
    sampling = SamplingParams(max_new_tokens=60, temperature=temperature, seed=1)
    call = Call(turns("Say it."), sampling, Constraint("regex", regex))
    done = run(backend.generate(call))
    if done.meta["finish_reason"]["type"] == "length":
        # An endless repetition may meet the limit; what is there must still be a beginning of a match.
        assert regex.endswith(("?", ".")) or "+" in regex
    else:
        assert re.fullmatch(regex, done.texts[0])
    pieces, _ = run(collect(backend, call))
    assert "".join(pieces) == done.texts[0]


def test_choices_are_scored_option_by_option(backend: Backend) -> None:
    call = ChoiceCall(turns("Is a river wet?"), ("yes", "no, never at all", "yes, it is"), unconditional=True)
    found = run(backend.score(call))
    assert len(found.scores) == 3
    for score in found.scores:
        assert score.logprobs
        assert all(value <= 0 for value in score.logprobs)
        assert score.unconditional is not None
        assert len(score.unconditional) == len(score.logprobs)
    again = run(backend.score(ChoiceCall(call.prompt, call.choices[::-1])))
    assert again.scores[0].unconditional is None
    for one, other in zip(found.scores, again.scores[::-1], strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)


def test_several_samples(backend: Backend) -> None:
    done = run(backend.generate(Call(raw("Pick"), SamplingParams(max_new_tokens=4, temperature=1.0), n=3)))
    assert len(done.texts) == 3
    assert done.meta["completion_tokens"] >= 3


def test_what_it_cannot_do_is_refused(backend: Backend) -> None:
    call = Call(raw("x"), greedy(), options={"no_such_option": 1})
    with pytest.raises(Unsupported, match="no_such_option"):
        run(backend.generate(call))
    with pytest.raises(Unsupported):
        run(collect(backend, call))
    with pytest.raises(Unsupported, match="one text"):
        run(collect(backend, Call(raw("x"), greedy(), n=2)))


def test_commit_warms_the_prefix(backend: Backend) -> None:
    backend.flush_cache()
    text = "A long shared beginning, said once and used by many that come after it. "
    run(backend.commit(raw(text)))
    warm = run(backend.generate(Call(raw(text + "Go on:"), greedy(2)))).meta
    assert warm["cached_tokens"] > warm["prompt_tokens"] // 2
    assert backend.flush_cache() is True
    cold = run(backend.generate(Call(raw(text + "Go on:"), greedy(2)))).meta
    assert cold["cached_tokens"] == 0


def test_it_says_who_it_is(backend: Backend) -> None:
    assert run(backend.info())["backend"] == backend.name


def test_cancelling_a_call_frees_what_it_held(backend: Backend) -> None:
    async def cancel() -> None:
        call = Call(raw("Go on and on"), SamplingParams(max_new_tokens=500, ignore_eos=True))
        task = asyncio.create_task(backend.generate(call))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task])

    run(cancel())
    assert run(backend.generate(Call(raw("Still there?"), greedy(2)))).texts


@sgl.function
def conversation(s: Any, question: str) -> None:
    s += sgl.system("You answer questions.")
    s += sgl.user(question)
    s += sgl.assistant(gen("answer", max_tokens=8))
    s += sgl.user("Yes or no?")
    s += sgl.assistant(select("verdict", ["yes", "no"]) + ". " + gen("number", dtype=int, max_tokens=6))
    forks = s.fork(3)
    forks += lambda i: sgl.user(f"Part {i}?")
    forks += sgl.assistant(gen("part", max_tokens=4))
    forks.join()


def test_programs_run_alike_alone_streamed_and_in_a_batch(backend: Backend) -> None:
    words = {"backend": backend, "temperature": 0}
    alone = conversation.run("Who rules there?", **words)
    streamed = conversation.run("Who rules there?", stream=True, **words)
    assert "".join(streamed.text_iter()) == alone.text() == streamed.text()
    assert streamed["part"] == alone["part"]
    batch = conversation.run_batch([{"question": q} for q in ("Who rules there?", "What?")] * 3, **words)
    assert [s.text() for s in batch][::2] == [alone.text()] * 3
    assert re.fullmatch(r"[-+]?[0-9]+", alone["number"])
    assert alone["verdict"] in ("yes", "no")
    usage = alone.usage()
    assert usage["calls"] == 6
    assert usage["completion_tokens"] > 4


def test_a_deadline_is_kept(backend: Backend) -> None:
    @sgl.function
    def endless(s: Any) -> None:
        s += "On and on" + gen("a", max_tokens=2000, ignore_eos=True)

    if backend.name == "mock":
        backend = sgl.MockBackend(delay_s=3600)
    with pytest.raises(Timeout):
        endless.run(backend=backend, timeout=0.02)["a"]


def test_only_backends_that_exist_are_listed() -> None:
    for name in BACKENDS.names():
        assert issubclass(BACKENDS.load(name), Backend)
