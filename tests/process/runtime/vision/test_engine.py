"""The whole engine with pictures: greedy tokens are transformers', in any set-up, and no picture's KV serves
another's prompt."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.api import Engine
from runtime.protocol.errors import BadRequest
from runtime.protocol.io_struct import CloseSessionReq, GenerateReqInput, OpenSessionReq
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams
from tests.unit.runtime.vision.making import PAD, Case, data_url, ids_of, picture

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
A, B = picture(140, 100, 1), picture(60, 200, 2)
PROMPTS: list[tuple[str, list[Any]]] = [
    (f"hello {IMAGE} what is it? {IMAGE} yes", [A, B]),
    (f"hello {IMAGE} what is it? {IMAGE} yes", [B, A]),
    ("hello there, no picture", []),
    (f"hello {IMAGE} what is it?", [A]),
    (IMAGE, [B]),
    (f"two at once{IMAGE}{IMAGE}", [A, A]),
    ("ends with one <|image_pad|>", [B]),
]
COUNT = 16
GREEDY = SamplingParams(max_new_tokens=COUNT, temperature=0.0, ignore_eos=True)


def made(case: Case, **words: Any) -> Engine:
    return Engine(str(case.path), dtype="float32", **{"max_total_tokens": 4096, "threads": 1, **words})


def asked(engine: Engine, prompts: list[tuple[str, list[Any]]]) -> list[Any]:
    data = [[data_url(one) for one in pictures] or None for _, pictures in prompts]
    return engine.generate([text for text, _ in prompts], GREEDY, image_data=data)


def right(case: Case) -> list[list[int]]:
    return [case.greedy(ids_of(text), pictures, COUNT) for text, pictures in PROMPTS]


@pytest.fixture(scope="module")
def case(checkpoint: Callable[..., Case]) -> Case:
    return checkpoint()


@pytest.fixture(scope="module")
def engine(case: Case) -> Iterator[Engine]:
    with made(case, max_images=3) as running:
        yield running


def test_greedy_tokens_of_a_batch_cold_and_from_the_cache(case: Case, engine: Engine) -> None:
    wanted = right(case)
    assert wanted[0] != wanted[1]  # the pictures matter
    engine.flush_cache()
    cold, warm = asked(engine, PROMPTS), asked(engine, PROMPTS)
    assert [one.output_ids for one in cold] == wanted
    assert [one.output_ids for one in warm] == wanted
    for output in warm:
        assert output.meta["cached_tokens"] == output.meta["prompt_tokens"] - 1


def test_another_picture_under_the_same_text_shares_no_more_than_the_text(engine: Engine) -> None:
    text = f"what do you see? {IMAGE} tell"
    before = len(ids_of(text.partition("<|image_pad|>")[0]))
    engine.flush_cache()
    first, other, again = (asked(engine, [(text, [picture(112, 84, seed)])])[0] for seed in (7, 8, 7))
    assert first.meta["prompt_tokens"] == other.meta["prompt_tokens"]
    assert other.meta["cached_tokens"] == before
    assert again.meta["cached_tokens"] == first.meta["prompt_tokens"] - 1
    assert again.output_ids == first.output_ids != other.output_ids


def test_log_probabilities_of_a_prompt_with_a_picture(case: Case, engine: Engine) -> None:
    text = f"a {IMAGE} b"
    output = engine.generate(
        text, SamplingParams(max_new_tokens=1, temperature=0.0),
        image_data=data_url(A), return_logprob=True, logprob_start_len=0,
    )  # fmt: skip
    whole = case.inputs(ids_of(text), [A])["input_ids"][0]
    scores = case.logits(ids_of(text), [A]).log_softmax(-1)
    told = output.meta["input_token_logprobs"]
    assert [token for _, token, _ in told] == whole.tolist()
    for at in range(1, len(whole)):
        assert told[at][0] == pytest.approx(float(scores[at - 1, whole[at]]), abs=2e-3)


def test_options_are_scored_behind_a_picture(case: Case, engine: Engine) -> None:
    text, options = f"is it {IMAGE} ", ["red", "green"]
    request = GenerateReqInput(text=text, choices=options, image_data=data_url(B), unconditional=True)
    (output,) = engine._pipeline.manager.batch([request])
    start = len(case.inputs(ids_of(text), [B])["input_ids"][0])
    for option, found in zip(options, output.choices):
        ids = ids_of(text + option)
        scores = case.logits(ids, [B]).log_softmax(-1)[start - 1 : -1]
        own = ids_of(option)
        wanted = [float(scores[at, token]) for at, token in enumerate(own)]
        assert found.logprobs == pytest.approx(wanted, abs=2e-3)


def test_samples_share_the_prompt(engine: Engine) -> None:
    params = {"n": 3, "max_new_tokens": 4, "temperature": 1.0, "sampling_seed": 3}
    outputs = engine.generate(f"x{IMAGE}y", params, image_data=[data_url(picture(99, 99, 5))])
    assert len(outputs) == 3
    assert {one.meta["cached_tokens"] for one in outputs} == {outputs[0].meta["prompt_tokens"] - 1}


def test_constrained_outputs(engine: Engine) -> None:
    params = {"max_new_tokens": 24, "temperature": 0.0, "regex": "the colour is (red|green)"}
    output = engine.generate(f"{IMAGE}", params, image_data=[data_url(A)])
    assert output.text in ("the colour is red", "the colour is green")


@pytest.mark.parametrize(
    ("fields", "where", "message"),
    [
        ({"text": "no place", "image_data": data_url(A)}, "images", "0 image placeholders.*1 images"),
        ({"text": f"{IMAGE}{IMAGE}", "image_data": data_url(A)}, "images", "2 image placeholders.*1 images"),
        ({"text": IMAGE}, "images", "1 image placeholders.*0 images"),
        ({"text": IMAGE * 4, "image_data": [data_url(A)] * 4}, "images", "at most 3"),
        ({"input_ids": [PAD, 1]}, "images", "1 image placeholders"),
        ({"text": IMAGE, "image_data": {"url": data_url(A), "detail": "fine"}}, "images\\[0\\]", "detail"),
        ({"text": IMAGE, "image_data": [5]}, "image_data\\[0\\]", "int"),
        ({"messages": [Message("user", "a")], "image_data": data_url(A)}, "image_data", "messages"),
    ],
)
def test_what_does_not_go_together(fields: dict[str, Any], where: str, message: str, engine: Engine) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        engine._pipeline.manager.generate(GenerateReqInput(**fields))
    assert caught.value.where is not None
    assert re.fullmatch(where, caught.value.where)


def test_a_session_takes_no_pictures(engine: Engine) -> None:
    opened = engine._pipeline.manager.control(OpenSessionReq(capacity=256))
    session = opened.data["session_id"]
    request = GenerateReqInput(text=IMAGE, image_data=data_url(A), session_params={"id": session})
    with pytest.raises(BadRequest, match="session"):
        engine._pipeline.manager.generate(request)
    engine._pipeline.manager.control(CloseSessionReq(session_id=session))


def test_messages_and_what_they_quote(case: Case, engine: Engine) -> None:
    """A template writes the placeholders; one that a user quotes is only letters. Pictures may stand outside
    of turns."""
    part = {"type": "image_url", "image_url": {"url": data_url(A), "detail": "low"}}
    quoted = {"type": "text", "text": "what is <|image_pad|>?"}
    ids = engine.prompt_ids(
        GenerateReqInput(messages=[Message("user", [quoted, part]), Message("assistant", "", open=True)])
    )
    head, tail = ids_of("<|im_start|>user\nwhat is "), ids_of("?<|vision_start|>")
    assert ids[: len(head)] == head
    letters = ids[len(head) :]
    assert letters[: letters.index(tail[0])].count(PAD) == 0
    pads = [at for at, one in enumerate(ids) if one == PAD]
    assert len(pads) == len(case.inputs([PAD], [A])["input_ids"][0])
    assert ids[pads[0] - len(tail) : pads[0]] == tail
    raw = engine.prompt_ids(
        GenerateReqInput(messages=[Message("raw", [part, {"type": "text", "text": "b"}])])
    )
    assert raw == case.inputs(ids_of(f"{IMAGE}b"), [A])["input_ids"][0].tolist()


def test_media_that_it_does_not_take(engine: Engine) -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "UklGRg=="}}
    with pytest.raises(BadRequest, match="text and image, got a part of type 'input_audio'"):
        engine.prompt_ids(GenerateReqInput(messages=[Message("user", [audio])]))
