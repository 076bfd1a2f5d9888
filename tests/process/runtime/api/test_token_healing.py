"""The end of a text prompt chosen anew: only the answer's text shows, and nothing changes where the model
takes the prompt's own token again."""

from __future__ import annotations

import asyncio
import math
import re
from typing import Any

import pytest

from runtime.api import Engine
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.frontend.prepare import Preparer
from runtime.processes.frontend.prompt import Limits
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import RuntimeFault
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
CUT = ["She said: Hel", "The quick brown fox jumps over the la", "The quick brown fox ", "one tw", "(", "x1"]


def spelled(engine: Engine, ids: list[int]) -> bytes:
    return b"".join(engine.vocabulary.tokens[token] for token in ids)


@pytest.mark.parametrize("prompt", CUT)
def test_the_text_is_what_follows_the_prompt(engine: Engine, prompt: str) -> None:
    out = engine.generate(prompt, GREEDY, token_healing=True)
    whole = spelled(engine, list(out.output_ids)).decode(errors="replace")
    assert whole.endswith(out.text)
    shown = len(whole) - len(out.text)
    assert prompt.endswith(whole[:shown])
    assert out.meta["prompt_tokens"] == len(engine.encode(prompt))
    assert out.meta["completion_tokens"] == len(out.output_ids) <= 12


@pytest.mark.parametrize("prompt", ["She said: yes. The qui", "3 + 4. Wel", "over the laz"])
def test_the_best_of_all_that_begin_so(engine: Engine, prompt: str) -> None:
    """One step decides: the first id is the most probable of those whose text begins with what was taken
    off."""
    healed = engine.generate(prompt, GREEDY, token_healing=True)
    tokens, first = engine.vocabulary.tokens, healed.output_ids[0]
    end = len(tokens[first]) - len(healed.text.encode()[: len(tokens[first])])
    left = next(
        tokens[first][:size]
        for size in range(len(tokens[first]), 0, -1)
        if prompt.encode().endswith(tokens[first][:size])
    )
    assert 0 <= end <= len(left)
    before = engine.encode(prompt)
    while left and tokens[before[-1]] and left.endswith(tokens[before[-1]]):
        left = left[: -len(tokens[before.pop()])]
    assert not left
    left = prompt.encode()[len(spelled(engine, before)) :]
    scored = engine.generate(
        before, SamplingParams(max_new_tokens=1, temperature=0.0), return_logprob=True,
        top_logprobs_num=len(tokens),
    )  # fmt: skip
    ranked = [token for _, token, *_ in scored.meta["output_top_logprobs"][0]]
    assert first == next(token for token in ranked if tokens[token].startswith(left))
    assert healed.text.startswith(tokens[first][len(left) :].decode())
    again = engine.generate([*before, first], GREEDY)
    assert list(healed.output_ids[1:]) == list(again.output_ids[:11])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("text", ["Q: who?\nA:", "The answer is", "Hello.\n"])
def test_the_same_token_again_changes_nothing(engine: Engine, text: str, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=temperature, seed=11)
    plain = engine.generate(text, params, return_logprob=True)
    healed = engine.generate(text, params, return_logprob=True, token_healing=True)
    if spelled(engine, list(healed.output_ids)).decode(errors="replace") != healed.text:
        pytest.skip("another token was chosen")
    assert list(healed.output_ids) == list(plain.output_ids)
    assert healed.text == plain.text
    counted = ("prompt_tokens", "completion_tokens", "decode_steps", "finish_reason")
    assert [healed.meta[name] for name in counted] == [plain.meta[name] for name in counted]
    for one, other in zip(
        healed.meta["output_token_logprobs"], plain.meta["output_token_logprobs"], strict=True
    ):
        assert one[1] == other[1]
        assert math.isclose(one[0], other[0], abs_tol=1e-3)


CONSTRAINTS = [
    r"lo, [a-z]+\.",
    "[a-z]{1,8}( [a-z]{1,8}){2}",
    "(low|lo there|l), ok",
    "zzz",
    r"\d\d",
    " ?you (yes|no)",
]


@pytest.mark.parametrize("spec", CONSTRAINTS)
@pytest.mark.parametrize("prompt", CUT)
def test_constraints_hold_behind_the_seam_with_jumps_and_without(
    engine: Engine, prompt: str, spec: str
) -> None:
    params = SamplingParams(max_new_tokens=40, temperature=0.0)
    outs = [
        engine.generate(
            prompt, params, constraint=Constraint("regex", spec), token_healing=True, jump_forward=jump
        )
        for jump in (True, False)
    ]
    assert re.fullmatch(spec, outs[0].text)
    assert outs[0].text == outs[1].text
    assert list(outs[0].output_ids) == list(outs[1].output_ids)
    assert outs[1].meta["jumped_tokens"] == 0 or outs[1].meta["grammar"]["closed_by_budget"]


def test_forced_text_joins_the_prompt_s_last_word(engine: Engine) -> None:
    """All is certain: the whole is what the tokenizer makes of it."""
    prompt, rest = "yes. The qui", "ck brown fox"
    out = engine.generate(prompt, GREEDY, constraint=Constraint("regex", rest), token_healing=True)
    assert out.text == rest
    whole = engine.encode(prompt + rest)
    assert list(out.output_ids) == whole[len(whole) - len(out.output_ids) :]
    assert out.meta["decode_steps"] == 0


@pytest.mark.parametrize("prompt", CUT)
def test_stop_strings_do_not_see_the_prompt(engine: Engine, prompt: str) -> None:
    free = engine.generate(prompt, GREEDY, token_healing=True).text
    for stop in filter(str.isascii, (free[0], free[1:3], prompt[-2:], prompt[-1])):  # no broken characters
        params = SamplingParams(max_new_tokens=12, temperature=0.0, stop=(stop,))
        out = engine.generate(prompt, params, token_healing=True)
        assert out.text == free.split(stop)[0]

        async def parts(params: SamplingParams = params) -> list[str]:
            request = GenerateReqInput(text=prompt, sampling_params=params, token_healing=True, stream=True)
            return [one.text async for one in engine.stream(request)]

        shown = asyncio.run(parts())
        assert shown[-1] == out.text
        assert all(out.text.startswith(one) for one in shown)


def test_samples_and_batches(engine: Engine) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=1.5, seed=3)
    samples = engine.generate(
        "She said: Hel", SamplingParams(max_new_tokens=8, temperature=1.5, seed=3, n=4), token_healing=True
    )
    assert len(samples) == 4
    alone = engine.generate("She said: Hel", params, token_healing=True)
    assert samples[0].text == alone.text
    together = engine.generate(CUT, GREEDY, token_healing=True)
    assert [one.text for one in together] == [
        engine.generate(prompt, GREEDY, token_healing=True).text for prompt in CUT
    ]


@pytest.fixture(scope="module")
def preparer(engine: Engine) -> Preparer:
    tokenizer: Tokenizer = engine._pipeline.model.tokenizer
    template: Any = engine._pipeline.model.template_choice.renderer
    return Preparer(tokenizer, template, Limits(len(tokenizer.vocabulary), 2048, 8192))


def healed(preparer: Preparer, **fields: Any) -> int:
    fields = {"sampling_params": {"max_new_tokens": 4}, "token_healing": True, "rid": "a"} | fields
    return preparer.prepare(GenerateReqInput(**fields)).requests[0].heal


def test_what_is_never_healed(preparer: Preparer, engine: Engine) -> None:
    text = "She said: Hel"
    assert healed(preparer, text=text) > 0
    assert healed(preparer, text=text, token_healing=False) == 0
    assert healed(preparer, input_ids=engine.encode(text)) == 0
    assert healed(preparer, text=text, logprob_start_len=0, return_logprob=True) == 0
    assert healed(preparer, text=text, return_hidden_states=True) == 0
    assert healed(preparer, text=text, sampling_params={"max_new_tokens": 0}) == 0
    for mark in engine._pipeline.model.tokenizer.control_texts:
        try:
            assert healed(preparer, text=text + mark) == 0, mark
        except RuntimeFault:
            continue
    turns = [Message("user", "Say it. Hel")]
    assert healed(preparer, messages=turns) == 0
