"""Plans and prefixes on the bundled engine and server: what was planned is what a run reads, what was cached
is not computed again."""

from __future__ import annotations

from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl.backends.engine import EngineBackend
from tests.process.patience import until


@sgl.function(temperature=0)
def ask(s: Any, question: str) -> None:
    s += sgl.system("You are a guide to the towns of the valley. Answer in one short sentence.")
    s += sgl.user("A traveller asks: " + question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=8))
    for index, fork in enumerate(s.fork(2)):
        fork += sgl.user(f"And {index}?") + sgl.assistant(sgl.gen("more", max_tokens=4))


@sgl.function(temperature=0)
def complete(s: Any, word: str) -> None:
    s += "The river of Ostrel is " + word + sgl.gen("x", max_tokens=4)


@pytest.fixture(scope="module", params=["engine", "endpoint"])
def backend(request: pytest.FixtureRequest, shared_server: Any) -> Any:
    if request.param == "endpoint":
        yield sgl.RuntimeEndpoint(shared_server.url)
        return
    made = EngineBackend("pocket")
    yield made
    made.close()


def test_a_plan_counts_the_tokens_that_a_run_reads(backend: Any) -> None:
    plan = ask.plan("where is Ostrel?", backend=backend)
    assert backend.name in plan.counted
    state = ask.run("where is Ostrel?", backend=backend)
    assert state.get_meta_info("answer")["prompt_tokens"] == plan.steps[0].prompt_tokens
    usage = state.usage()
    assert usage["calls"] == plan.calls == 3
    # Generated text counts as long as it may be.
    assert usage["prompt_tokens"] <= sum(step.prompt_tokens for step in plan.steps if step.wave is not None)
    assert usage["completion_tokens"] <= plan.completion_tokens
    (step,) = complete.plan("called", backend=backend).steps
    assert complete.run("called", backend=backend).get_meta_info("x")["prompt_tokens"] == step.prompt_tokens


def test_the_constant_begin_is_cached_and_found(backend: Any) -> None:
    until(backend.flush_cache)  # not while an earlier test's last request comes to its end
    assert ask.cache(backend)
    found = [ask.run(question, backend=backend).get_meta_info("answer") for question in ("who?", "why?")]
    begin = ask.plan("", backend=backend).steps[0].prompt_tokens
    for meta in found:
        # All but what closes the turn, and a token that may merge with the question.
        assert begin - 12 <= meta["cached_tokens"] <= begin
