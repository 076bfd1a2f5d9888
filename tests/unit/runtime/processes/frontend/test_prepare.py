"""What a request becomes, and what is said about a wrong one."""

from __future__ import annotations

from typing import Any

import pytest

from runtime.formats.chat.registry import get_chat_template
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.frontend.prepare import Preparer
from runtime.processes.frontend.prompt import Limits
from runtime.protocol.constraint import Constraint
from runtime.protocol.errors import BadConstraint, BadRequest, PromptTooLong, TemplateError
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams

LIMITS = Limits(vocab_size=512, context=64, slots=1000, top_logprobs=5, token_ids_logprob=3)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_files: dict[str, dict[str, Any]]) -> Tokenizer:
    return Tokenizer(tokenizer_files["byte level"], {"eos_token": "<|im_end|>"}, 512)


@pytest.fixture(scope="module")
def with_bos(tokenizer_files: dict[str, dict[str, Any]]) -> Tokenizer:
    return Tokenizer(tokenizer_files["sentencepiece"], {"bos_token": "<s>", "eos_token": "</s>"}, 512)


@pytest.fixture(scope="module")
def preparer(tokenizer: Tokenizer) -> Preparer:
    return Preparer(tokenizer, get_chat_template("chatml"), LIMITS, clock=lambda: 100.0)


WRONG: list[tuple[dict[str, Any], type[BadRequest], str, str]] = [
    ({}, BadRequest, "text", "Either text, input_ids or input_embeds should be provided."),
    ({"text": "a", "input_ids": [5]}, BadRequest, "prompt", "text and input_ids"),
    ({"text": 5}, BadRequest, "text", "string"),
    ({"text": "", "session_params": {"id": "s"}}, BadRequest, "text", "empty"),
    ({"input_ids": []}, BadRequest, "input_ids", "empty"),
    ({"input_ids": "ab"}, BadRequest, "input_ids", "list"),
    ({"input_ids": [1, 512]}, BadRequest, "input_ids[1]", "511"),
    ({"input_ids": [1, -1]}, BadRequest, "input_ids[1]", "511"),
    ({"input_ids": [True]}, BadRequest, "input_ids[0]", "True"),
    ({"input_ids": [5] * 64}, PromptTooLong, "prompt", "64 tokens"),
    (
        {"input_ids": [5] * 65, "sampling_params": SamplingParams(max_new_tokens=0)},
        PromptTooLong,
        "prompt",
        "65",
    ),
    ({"messages": []}, BadRequest, "messages", "empty"),
    ({"messages": [Message("user", open=True), Message("user")]}, TemplateError, "messages[0]", "open"),
    ({"text": "a", "tools": [{"x": 1}]}, BadRequest, "tools", "messages"),
    ({"text": "a", "sampling_params": SamplingParams(top_p=2.0)}, BadRequest, "sampling_params.top_p", "2.0"),
    (
        {"text": "a", "sampling_params": SamplingParams(temperature="hot")},
        BadRequest,
        "sampling_params",
        "float",
    ),  # type: ignore[arg-type]
    (
        {"text": "a", "sampling_params": SamplingParams(stop_token_ids=(600,))},
        BadRequest,
        "stop_token_ids",
        "600",
    ),
    ({"text": "a", "constraint": Constraint("regex", "")}, BadConstraint, "regex", "empty"),
    ({"text": "a", "constraint": Constraint("yaml", "x")}, BadConstraint, "constraint.kind", "yaml"),  # type: ignore[arg-type]
    ({"text": "a", "choices": []}, BadRequest, "choices", "at least one"),
    ({"text": "a", "choices": ["a", ""]}, BadRequest, "choices[1]", "empty"),
    ({"text": "a", "choices": ["a", 3]}, BadRequest, "choices[1]", "int"),
    ({"text": "a", "choices": ["a", "the " * 200]}, PromptTooLong, "choices[1]", "64"),
    (
        {"text": "a", "choices": ["a"], "constraint": Constraint("regex", "a")},
        BadRequest,
        "constraint",
        "choice",
    ),
    ({"text": "a", "logprob_start_len": 9}, BadRequest, "logprob_start_len", "9"),
    ({"text": "a", "top_logprobs_num": -1}, BadRequest, "top_logprobs_num", "-1"),
    ({"text": "a", "top_logprobs_num": 6}, BadRequest, "top_logprobs_num", "from 0 to 5"),
    ({"text": "a", "token_ids_logprob": [1, 2, 3, 4]}, BadRequest, "token_ids_logprob", "at most 3"),
    ({"text": "a", "timeout_s": 0}, BadRequest, "timeout_s", "positive"),
    ({"text": "a", "rid": ""}, BadRequest, "rid", "empty"),
    ({"text": "a", "extra_key": 5}, BadRequest, "extra_key", "str"),
]


@pytest.mark.parametrize(("fields", "kind", "where", "says"), WRONG)
def test_wrong_requests(
    preparer: Preparer, fields: dict[str, Any], kind: type[BadRequest], where: str, says: str
) -> None:
    with pytest.raises(kind) as caught:
        preparer.prepare(GenerateReqInput(**fields))
    assert type(caught.value) is kind
    assert where in str(caught.value.where)
    assert says in caught.value.message


def test_text_ids_and_messages_come_out_as_ids(preparer: Preparer, tokenizer: Tokenizer) -> None:
    (by_text,) = preparer.prepare(GenerateReqInput(text="the dog")).requests
    assert by_text.input_ids == tokenizer.encode("the dog")
    (by_ids,) = preparer.prepare(GenerateReqInput(input_ids=[3, 4])).requests
    assert by_ids.input_ids == [3, 4]
    messages = [Message("user", "the dog"), Message("assistant", open=True)]
    (by_turns,) = preparer.prepare(GenerateReqInput(messages=messages)).requests
    assert tokenizer.decode(by_turns.input_ids, skip_special_tokens=False) == (
        "<|im_start|>user\nthe dog<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_built_in_template_ends_turns_where_it_says(preparer: Preparer) -> None:
    messages = [Message("assistant", open=True)]
    (request,) = preparer.prepare(GenerateReqInput(messages=messages)).requests
    assert request.sampling_params.stop_token_ids == (2,)
    (plain,) = preparer.prepare(GenerateReqInput(messages=[Message("raw", "x")])).requests
    assert plain.sampling_params.stop_token_ids == ()


def test_a_mark_the_tokenizer_does_not_know_stops_as_text(with_bos: Tokenizer) -> None:
    made = Preparer(with_bos, get_chat_template("chatml"), LIMITS)
    (request,) = made.prepare(GenerateReqInput(messages=[Message("assistant", open=True)])).requests
    assert request.sampling_params.stop == ("<|im_end|>",)


def test_output_ends_where_the_context_ends(preparer: Preparer) -> None:
    (request,) = preparer.prepare(
        GenerateReqInput(input_ids=[5] * 60, sampling_params=SamplingParams(min_new_tokens=9))
    ).requests
    assert (request.sampling_params.max_new_tokens, request.sampling_params.min_new_tokens) == (4, 4)
    full = GenerateReqInput(input_ids=[5] * 64, sampling_params=SamplingParams(max_new_tokens=0))
    assert preparer.prepare(full).requests[0].sampling_params.max_new_tokens == 0


def test_ids_behind_the_door_are_never_used_twice(preparer: Preparer) -> None:
    request = GenerateReqInput(rid="r", text="a", choices=["b", "c"])
    rids = [part.rid for _ in range(3) for part in preparer.prepare(request).requests]
    assert len(set(rids)) == 6


def test_a_deadline_is_counted_from_now(preparer: Preparer) -> None:
    assert preparer.prepare(GenerateReqInput(text="a", timeout_s=2.5)).deadline == 102.5


def test_text_begins_only_where_the_prompt_is_control_ids(with_bos: Tokenizer) -> None:
    made = Preparer(with_bos, None, LIMITS)
    assert made.prepare(GenerateReqInput(text="")).requests[0].at_start
    assert not made.prepare(GenerateReqInput(text="the")).requests[0].at_start
    # A constraint speaks of all of the text.
    constrained = GenerateReqInput(text="", constraint=Constraint("regex", " a"))
    assert not made.prepare(constrained).requests[0].at_start


@pytest.mark.parametrize("prompt", ["Well, the", "Well, th", "a", "", "She said: ", "서"])
@pytest.mark.parametrize(
    "options",
    [["e dog", "e dog sleeps", " fox"], ["e", "ee"], [" yes", " no", " yes, maybe"], ["울은", "x", "x"]],
)
def test_options_are_compared_over_the_same_text(
    with_bos: Tokenizer, tokenizer: Tokenizer, prompt: str, options: list[str]
) -> None:
    for made, used in (
        (Preparer(with_bos, None, LIMITS), with_bos),
        (Preparer(tokenizer, None, LIMITS), tokenizer),
    ):
        job = made.prepare(GenerateReqInput(text=prompt, choices=options, unconditional=True))
        assert [option.text for option in job.options] == options
        heads = set()
        for option in job.options:
            scored = job.requests[option.scored]
            head = scored.logprob_start_len
            assert head >= 1
            assert tuple(scored.input_ids[head:]) == option.ids
            assert scored.sampling_params.max_new_tokens == 0
            heads.add(tuple(scored.input_ids[:head]))
            # Head and option together are the tokenizer's own spelling of prompt + option.
            ids = [token for token in scored.input_ids if token not in used.vocabulary.special]
            whole = used.encode(prompt + option.text, add_special_tokens=False)
            assert ids == whole
            assert option.alone is not None
            alone = job.requests[option.alone]
            assert tuple(alone.input_ids[alone.logprob_start_len :]) == option.ids
        assert len(heads) == 1


def test_options_after_ids_leave_the_ids_alone(preparer: Preparer, tokenizer: Tokenizer) -> None:
    job = preparer.prepare(GenerateReqInput(input_ids=[7, 8, 9], choices=["the", " dog"]))
    assert [tuple(part.input_ids[:3]) for part in job.requests] == [(7, 8, 9)] * 2
    assert [part.logprob_start_len for part in job.requests] == [3, 3]


def test_an_empty_prompt_begins_behind_the_end_of_another_text(
    preparer: Preparer, tokenizer: Tokenizer, with_bos: Tokenizer
) -> None:
    (request,) = preparer.prepare(GenerateReqInput(text="")).requests
    assert request.input_ids == sorted(tokenizer.eos)
    assert request.at_start
    (request,) = Preparer(with_bos, None, LIMITS).prepare(GenerateReqInput(text="")).requests
    assert request.input_ids == [with_bos.bos]


def test_nothing_to_start_from(tokenizer_files: dict[str, dict[str, Any]]) -> None:
    made = Preparer(Tokenizer(tokenizer_files["byte level"], {}, 512), None, LIMITS)
    with pytest.raises(BadRequest, match="neither a begin-of-text"):
        made.prepare(GenerateReqInput(text=""))
    with pytest.raises(BadRequest, match="no token before it"):
        made.prepare(GenerateReqInput(text="", choices=["a"]))
    job = made.prepare(GenerateReqInput(text="the ", choices=["a"], unconditional=True))
    alone = job.options[0].alone
    assert alone is not None
    assert job.requests[alone].logprob_start_len == 0


HUGE = "the dog " * (4 << 20)
FINE = {"top_logprobs_num": 5, "token_ids_logprob": [1, 2, 3]}


def test_log_probabilities_up_to_the_limits(preparer: Preparer) -> None:
    (made,) = preparer.prepare(GenerateReqInput(text="a", **FINE)).requests
    assert (made.top_logprobs_num, made.token_ids_logprob) == (5, [1, 2, 3])


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"text": HUGE}, "prompt"),
        ({"text": "a" * 100_000}, "prompt"),
        ({"text": " " * 100_000}, "prompt"),
        ({"messages": [Message("user", HUGE)]}, "prompt"),
        ({"messages": [Message("user", [{"type": "text", "text": HUGE}])]}, "prompt"),
        ({"messages": [Message("user", "a"), Message("assistant", HUGE, open=True)]}, "prompt"),
        ({"text": "a", "choices": ["b", HUGE]}, "choices[1]"),
    ],
    ids=lambda case: case if isinstance(case, str) else None,
)
def test_what_can_never_fit_is_refused_by_its_size(
    preparer: Preparer, fields: dict[str, Any], where: str
) -> None:
    """Said in characters: nobody has counted its tokens."""
    with pytest.raises(PromptTooLong, match=r"characters; the 64 available tokens") as caught:
        preparer.prepare(GenerateReqInput(**fields))
    assert caught.value.where == where


def test_what_may_fit_is_counted(preparer: Preparer, tokenizer: Tokenizer) -> None:
    text = "the dog " * 40
    assert len(tokenizer.encode(text)) > 64
    with pytest.raises(PromptTooLong, match=r"tokens; the context length is 64"):
        preparer.prepare(GenerateReqInput(text=text))
    assert len(preparer.prompt_ids(GenerateReqInput(text=text * 100))) > 6400


@pytest.mark.parametrize("text", ["the dog " * 50_000, "naïve café 🦊 " * 20_000])
def test_a_long_prompt_is_cut_where_that_is_wanted(tokenizer: Tokenizer, text: str) -> None:
    limits = Limits(vocab_size=512, context=64, slots=1000, auto_truncate=True)
    (made,) = Preparer(tokenizer, None, limits).prepare(GenerateReqInput(text=text)).requests
    assert made.input_ids == tokenizer.encode(text)[: len(made.input_ids)]
    assert len(made.input_ids) == 63
