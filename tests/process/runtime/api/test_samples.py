"""Several samples of a prompt, and parameters as users write them, on a real model."""

from __future__ import annotations

import re
from typing import Any

import pytest

from runtime.api import Engine, make_params
from runtime.protocol.errors import BadRequest, RuntimeFault
from runtime.protocol.io_struct import GenerateOutput, GenerateReqInput
from runtime.protocol.sampling import SamplingParams

PROMPT = "The quick brown fox jumps over the lazy dog. Well,"


def texts(engine: Engine, prompt: object, params: object) -> list[str]:
    return [output.text for output in engine.generate(prompt, params)]  # type: ignore[call-overload]


def test_samples_of_a_seed_differ_repeat_and_do_not_depend_on_how_many(engine: Engine) -> None:
    def ask(n: int, seed: int) -> list[str]:
        return texts(engine, PROMPT, {"n": n, "seed": seed, "max_new_tokens": 8, "ignore_eos": True})

    four = ask(4, 11)
    assert len(set(four)) == 4
    assert four == ask(4, 11)
    assert ask(2, 11) == four[:2]
    single = engine.generate(PROMPT, {"seed": 11, "max_new_tokens": 8, "ignore_eos": True})
    assert single.text == four[0]
    assert ask(2, 2**63 - 1) == ask(2, 2**63 - 1)
    unseeded = [{"n": 3, "max_new_tokens": 8, "ignore_eos": True}] * 2
    drawn = texts(engine, [PROMPT, PROMPT], unseeded)
    assert len(set(drawn)) == 6


def test_samples_compute_their_prompt_once(engine: Engine) -> None:
    engine.flush_cache()
    before = engine.state()["computed"]
    outputs = engine.generate(PROMPT * 4, {"n": 6, "max_new_tokens": 2, "ignore_eos": True})
    assert isinstance(outputs, list)
    length = outputs[0].meta["prompt_tokens"]
    assert all(output.meta["cached_tokens"] >= length - 2 for output in outputs)
    assert engine.state()["computed"] - before < length + 6 * 5


def test_greedy_samples_are_the_greedy_text_in_rounds(engine: Engine) -> None:
    prompts = [PROMPT, "She said:"]
    singles = texts(engine, prompts, {"temperature": 0, "max_new_tokens": 6})
    assert texts(engine, prompts, {"temperature": 0, "max_new_tokens": 6, "n": 3}) == singles * 3


def test_constraints_among_the_parameters_differ_by_item(engine: Engine) -> None:
    params = [{"regex": "[ab]{3}", "max_new_tokens": 9}, {"regex": "[0-9]{2}", "max_new_tokens": 9}]
    letters, digits = texts(engine, ["a", "b"], params)
    assert re.fullmatch("[ab]{3}", letters)
    assert re.fullmatch("[0-9]{2}", digits)


def test_lists_of_requests_and_of_mixed_prompts(engine: Engine) -> None:
    params = {"temperature": 0, "max_new_tokens": 4}
    by_text = engine.generate(PROMPT, params)
    ids = engine.encode(PROMPT)
    prompts: list[Any] = [PROMPT, ids, GenerateReqInput(text=PROMPT)]
    mixed = engine.generate(prompts, params)
    assert [output.text for output in mixed] == [by_text.text] * 3
    outcomes = engine.generate(
        [
            GenerateReqInput(text="a", sampling_params={"max_new_tokens": 1}),
            GenerateReqInput(text=["a", "b"]),
        ],
        on_error="return",
    )
    assert isinstance(outcomes[0], GenerateOutput)
    assert isinstance(outcomes[1], RuntimeFault)
    whole = engine.generate(GenerateReqInput(text=["a", "b"], sampling_params={"max_new_tokens": 1}))
    assert isinstance(whole, list)
    assert len(whole) == 2


def test_parameters_alone_hold_no_constraint() -> None:
    assert make_params({"stop": "x", "logit_bias": {"3": 1}}) == SamplingParams(
        stop=("x",), logit_bias={3: 1.0}
    )
    with pytest.raises(BadRequest, match="regex"):
        make_params({"regex": "a"})
