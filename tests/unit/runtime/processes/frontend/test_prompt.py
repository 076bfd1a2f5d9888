"""Prompts around a hole, and messages with media, at the frontend."""

# ruff: noqa: E501 - tables

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Fast

from runtime.config.engine import EngineConfig
from runtime.formats.chat import get_chat_template, get_completion_template
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.processes.checkpoint.tokenizer import Tokenizer
from runtime.processes.frontend.prepare import Preparer
from runtime.processes.frontend.prompt import Limits
from runtime.protocol.errors import BadRequest
from runtime.protocol.io_struct import GenerateReqInput
from runtime.protocol.messages import Message
from runtime.protocol.sampling import SamplingParams
from tests.exploring import tries

LIMITS = Limits(400, 2000, 2000)


def tokenizer(*names: str, bos: str | None = None, eos: str | None = None) -> Tokenizer:
    """Bytes, and the marks of the completion templates `names`."""
    made = Fast(models.BPE({char: at for at, char in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    marks = [mark for name in names for mark in get_completion_template(name).stop_str]
    made.add_special_tokens([AddedToken(text, special=True) for text in ["<s>", "<|im_end|>", *marks]])
    made.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    config: dict[str, Any] = {"bos_token": bos, "add_bos_token": True} if bos else {}
    if eos:
        config["eos_token"] = eos
    return Tokenizer(json.loads(made.to_str()), config, LIMITS.vocab_size)


@pytest.mark.parametrize("name", ["deepseek-coder", "star_coder", "qwen-coder"])
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("bos", [None, "<s>"])
def test_the_hole_is_filled_as_the_tokenizers_tokens_say(name: str, asked: bool, bos: str | None) -> None:
    known = tokenizer(name, bos=bos)
    made = Preparer(known, None, LIMITS, completion_template=name if asked else None)
    (request,) = made.prepare(GenerateReqInput(text="def f(", suffix="): pass")).requests
    template = get_completion_template(name)
    assert request.input_ids == known.encode(template.render("def f(", "): pass"))
    assert known.decode(request.input_ids, False) == (bos or "") + template.render("def f(", "): pass")
    marks = {known.added_id(mark) for mark in template.stop_str}
    assert marks <= set(request.sampling_params.stop_token_ids)


@settings(max_examples=tries(60), deadline=None)
@given(
    *[
        st.lists(st.sampled_from(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<s>", "<think>", "a", "\n"]))
        .map("".join)
    ]
    * 2
)  # fmt: skip
def test_marks_in_the_text_around_the_hole_are_letters(before: str, after: str) -> None:
    known = KNOWN
    made = Preparer(known, None, LIMITS)
    (request,) = made.prepare(GenerateReqInput(text=before, suffix=after)).requests
    template = get_completion_template("qwen-coder")
    control = {known.added_id(text) for text in known.control_texts}
    ours = [known.added_id(mark) for mark in (template.begin, template.end, template.middle)]
    assert [token for token in request.input_ids if token in control] == ours
    assert known.decode(request.input_ids, False) == template.render(before, after)
    allowed = GenerateReqInput(text=before, suffix=after, allow_control_tokens=True)
    assert made.prepare(allowed).requests[0].input_ids == known.encode(template.render(before, after))


KNOWN = tokenizer("qwen-coder")


def test_several_templates_that_fit_are_an_error_that_names_them() -> None:
    made = Preparer(tokenizer("qwen-coder", "star_coder"), None, LIMITS)
    with pytest.raises(BadRequest, match="qwen-coder, star_coder") as caught:
        made.prepare(GenerateReqInput(text="a", suffix="b"))
    assert caught.value.where == "suffix"
    assert "completion_template=" in str(caught.value)


def test_none_that_fits_is_an_error_that_names_the_option() -> None:
    with pytest.raises(BadRequest, match=r"completion_template= one of .*deepseek-coder.*star_coder"):
        Preparer(tokenizer(), None, LIMITS).prepare(GenerateReqInput(text="a", suffix=""))


def test_an_unknown_completion_template_lists_the_known_ones() -> None:
    with pytest.raises(BadRequest, match="star_coder") as caught:
        Preparer(KNOWN, None, LIMITS, completion_template="nobody")
    assert caught.value.where == "completion_template"


def test_a_suffix_goes_with_text() -> None:
    made = Preparer(KNOWN, get_chat_template("chatml"), LIMITS)
    for fields in ({"input_ids": [1]}, {"messages": [Message("user", "U")]}):
        with pytest.raises(BadRequest, match="needs text") as caught:
            made.prepare(GenerateReqInput(suffix="b", **fields))  # type: ignore[arg-type]
        assert caught.value.where == "suffix"
    with pytest.raises(BadRequest, match="str"):
        made.prepare(GenerateReqInput(text="a", suffix=5))  # type: ignore[arg-type]


def test_what_the_user_stops_at_stays() -> None:
    made = Preparer(KNOWN, None, LIMITS)
    params = SamplingParams(stop=("\n\n",), stop_token_ids=(7,))
    (request,) = made.prepare(GenerateReqInput(text="a", suffix="b", sampling_params=params)).requests
    assert request.sampling_params.stop == ("\n\n",)
    assert request.sampling_params.stop_token_ids[0] == 7


def test_the_engines_options() -> None:
    config = EngineConfig.of({"completion_template": "star_coder", "allow_control_tokens": True})
    assert (config.completion_template, config.allow_control_tokens) == ("star_coder", True)
    assert (EngineConfig.of({}).completion_template, EngineConfig.of({}).allow_control_tokens) == (
        None,
        False,
    )


# -- media -------------------------------------------------------------------------------------------------

IMAGE: dict[str, Any] = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
AUDIO: dict[str, Any] = {"type": "input_audio", "input_audio": {"data": "UklGRg=="}}
VIDEO: dict[str, Any] = {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}}
TALK = [Message("user", "U"), Message("user", [{"type": "text", "text": "a"}, IMAGE])]
PARTS = JinjaChatTemplate(
    {
        "default": "{% for m in messages %}{% for c in m.content %}{{ c.text or '<' ~ c.type ~ '>' }}{% endfor %}{% endfor %}"
    }
)


@pytest.mark.parametrize("template", [PARTS, get_chat_template("chatml"), None])
@pytest.mark.parametrize("part", [IMAGE, AUDIO, VIDEO])
def test_a_text_model_refuses_media_by_name(template: Any, part: dict[str, Any]) -> None:
    talk = [Message("user", "U"), Message("user", [{"type": "text", "text": "a"}, part])]
    with pytest.raises(BadRequest, match=f"text only.*{part['type']}") as caught:
        Preparer(KNOWN, template, LIMITS).prepare(GenerateReqInput(messages=talk))
    assert (caught.value.where, caught.value.status) == ("messages[1].content[1]", 400)


@pytest.mark.parametrize("part", [{"type": "hologram"}, {"type": 5}, {}, "bare", None, [1]])
def test_a_part_of_no_known_type_names_its_place(part: Any) -> None:
    talk = [Message("user", [{"type": "text", "text": "a"}, part])]
    with pytest.raises(BadRequest) as caught:
        Preparer(KNOWN, PARTS, LIMITS).prepare(GenerateReqInput(messages=talk))
    assert str(caught.value.where).startswith("messages[0].content[1]")
    if isinstance(part, dict):
        assert "known: text, image_url, input_image, video_url, audio_url, input_audio" in str(caught.value)


def test_plain_dicts_are_messages_too() -> None:
    talk: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ]
    made = Preparer(KNOWN, get_chat_template("chatml"), LIMITS)
    job = made.prepare(GenerateReqInput(messages=talk))
    assert "a b" in KNOWN.decode(job.requests[0].input_ids, False)


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}END{% endfor %}"


@pytest.mark.parametrize(
    ("source", "eos", "expected"),
    [
        # The checkpoint ends with <s>, which the template never writes.
        (TURNS.replace("END", "<|im_end|>\n"), "<s>", ["<|im_end|>"]),
        (TURNS.replace("END", "\n<|im_end|>\n"), "<s>", ["<|im_end|>"]),
        # Nothing ends a reply but the next turn's mark.
        (TURNS.replace("END", "").replace("[", "<|im_end|>["), "<s>", ["<|im_end|>"]),
        # It ends as the template says, by name or by variable, or says itself where several messages end.
        (TURNS.replace("END", "<|im_end|>"), "<|im_end|>", []),
        (TURNS.replace("END", "{{ eos_token }}"), "<s>", []),
        (TURNS.replace("END", "{{ '<s>' if loop.last else '<|im_end|>' }}"), "<s>", []),
        # No token ends it; a text is not made a stop string.
        (TURNS.replace("END", " STOP"), "<s>", []),
        (TURNS.replace("END", ""), "<s>", []),
        ("{{ raise_exception('no') if messages | length > 1 }}{{ messages[0].content }}", "<s>", []),
    ],
)
def test_a_reply_ends_where_the_jinja_template_says(source: str, eos: str, expected: list[str]) -> None:
    known = tokenizer(eos=eos)
    template = JinjaChatTemplate({"default": source}, {"eos_token": eos})
    preparer = Preparer(known, template, LIMITS)
    for _ in range(2):
        (request,) = preparer.prepare(GenerateReqInput(messages=[Message("user", "U")])).requests
        assert [*request.sampling_params.stop_token_ids] == [known.added_id(text) for text in expected]
        assert not request.sampling_params.stop
    (plain,) = preparer.prepare(GenerateReqInput(text="U")).requests
    assert not plain.sampling_params.stop_token_ids
