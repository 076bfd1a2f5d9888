"""An engine whose model two processes share (tp_size=2) answers as one with a model of its own, and says
so when one of the two is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from runtime.api import Engine
from runtime.protocol.errors import EngineDead, InternalFault, RuntimeFault
from tests.unit.runtime.engine.ranks.ranks_here import rank_processes

OPTIONS: dict[str, Any] = {
    "max_total_tokens": 4096, "dtype": "float32", "device": "cpu", "threads": 1, "seed": 3,
    "chunked_prefill_size": 32,
}  # fmt: skip
PROMPTS = [
    "The city of", "Q: What is 2 + 2?\nA:", "One, two, three, ", "The ruler of " * 30 + "Hesper is", "a",
]  # fmt: skip
GREEDY = {"max_new_tokens": 32, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Engine, Engine]]:
    with Engine("pocket", **OPTIONS) as one, Engine("pocket", tp_size=2, **OPTIONS) as two:
        yield one, two


@pytest.fixture
def doomed() -> Iterator[tuple[Engine, list[psutil.Process]]]:
    """An engine that may be broken, and the processes of its ranks; other tests' engines have some, too."""
    others = rank_processes()
    with Engine("pocket", tp_size=2, **OPTIONS) as engine:
        yield engine, [one for one in rank_processes() if one not in others]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        {"max_new_tokens": 24, "temperature": 0.9, "top_p": 0.9, "seed": 11},
        {"max_new_tokens": 24, "temperature": 0.7, "seed": 5, "frequency_penalty": 0.4, "n": 2},
        {"max_new_tokens": 24, "temperature": 0, "regex": "(yes|no), [a-z]{3,8}[.]"},
        {"max_new_tokens": 60, "temperature": 1.0, "seed": 2, "json_schema": '{"type": "integer"}'},
    ],
    ids=["greedy", "sampled", "two samples", "regex", "json"],
)
def test_the_text_is_the_same(pair: tuple[Engine, Engine], params: dict[str, Any]) -> None:
    one, two = (engine.generate(PROMPTS, params) for engine in pair)
    assert [output.output_ids for output in one] == [output.output_ids for output in two]


def test_log_probabilities_are_the_same_up_to_rounding(pair: tuple[Engine, Engine]) -> None:
    asked = {
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 3,
        "token_ids_logprob": [5, 9],
    }
    for mine, theirs in zip(*(engine.generate(PROMPTS[:3], GREEDY, **asked) for engine in pair), strict=True):
        for name in ("input_token_logprobs", "output_token_logprobs"):
            rows = [[(value or 0.0, token) for value, token, *_ in out.meta[name]] for out in (mine, theirs)]
            assert [token for _, token in rows[0]] == [token for _, token in rows[1]]
            assert [value for value, _ in rows[0]] == pytest.approx([value for value, _ in rows[1]], abs=1e-3)


def test_vectors_are_the_same_up_to_rounding(pair: tuple[Engine, Engine]) -> None:
    one, two = (engine.embed(PROMPTS) for engine in pair)
    for mine, theirs in zip(one, two, strict=True):
        assert mine.embedding == pytest.approx(theirs.embedding, abs=1e-4)


def test_a_lost_rank_is_named_to_those_who_wait_and_those_who_come(
    doomed: tuple[Engine, list[psutil.Process]],
) -> None:
    two, ranks = doomed
    assert len(ranks) == 2
    stream = two.generate("The city of", {"max_new_tokens": 1500, "ignore_eos": True}, stream=True)
    next(stream)
    os.kill(ranks[1].pid, signal.SIGKILL)
    told = "rank 1 of the model's process was killed by SIGKILL"
    with pytest.raises((EngineDead, InternalFault), match=told):
        for _ in stream:
            pass
    with pytest.raises(RuntimeFault, match=told):
        two.generate("a", GREEDY)
    assert not psutil.wait_procs(ranks, timeout=300)[1], "the other one ends, too"
