"""Messages with text, image, video and audio: what is rendered in each format, and what comes out beside."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.formats.chat import Rendered, get_chat_template
from runtime.formats.chat.jinja import JinjaChatTemplate
from runtime.formats.chat.render import conversation, render, render_prompt
from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.errors import BadRequest, TemplateError
from runtime.protocol.messages import RAW_ROLE, ImageData, Message
from tests.exploring import tries

TALK = [
    Message("system", "Look and listen."),
    Message(
        "user",
        [
            {"type": "text", "text": "What is"},
            {"type": "image_url", "image_url": {"url": "https://example.org/1.png"}, "modalities": "image"},
            {"type": "text", "text": "this,"},
            {"type": "text", "text": "and this?"},
            {"type": "video_url", "video_url": {"url": "https://example.org/2.mp4"}},
            {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "mp3"}},
        ],
    ),
    Message("assistant", "A cat."),
    Message(
        "user",
        [
            {"type": "audio_url", "audio_url": {"url": "https://example.org/3.wav"}},
            {"type": "input_image", "image_url": "https://example.org/4.png", "detail": "low"},
            {"type": "text", "text": "And now?"},
        ],
    ),
    Message("assistant", "", open=True),
]
MEDIA: dict[str, Any] = {
    "images": (ImageData("https://example.org/1.png"), ImageData("https://example.org/4.png", "low")),
    "videos": ("https://example.org/2.mp4",),
    "audios": ("data:audio/mp3;base64,UklGRg==", "https://example.org/3.wav"),
    "modalities": ("image",),
}
PARTS = JinjaChatTemplate(
    {
        "default": "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for c in m.content %}"
        "{% if c.type == 'text' %}{{ c.text }}{% else %}[{{ c.type }}]{% endif %}"
        "{% endfor %}{% endif %}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    }
)
TEXT = JinjaChatTemplate(
    {
        "default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    }
)


def test_a_message_list_with_text_image_video_and_audio_in_the_openai_format() -> None:
    assert PARTS.content_format == "openai"
    assert render(TALK, PARTS) == Rendered(
        "<system>Look and listen.</system>"
        "<user>What is[image]this,and this?[video][audio]</user><assistant>A cat.</assistant>"
        "<user>[audio][image]And now?</user><assistant>",
        **MEDIA,
    )


def test_a_message_list_with_text_image_video_and_audio_in_the_string_format() -> None:
    assert TEXT.content_format == "string"
    assert render(TALK, TEXT) == Rendered(
        "<system>Look and listen.</system><user>What is this, and this?</user><assistant>A cat.</assistant>"
        "<user>And now?</user><assistant>",
        **MEDIA,
    )


@pytest.mark.parametrize(
    "name", ["chatml-llava", "qwen2-vl", "minicpmo", "gemma-it", "vicuna_v1.1", "chatml"]
)
def test_a_built_in_template_has_its_tokens_where_media_stand(name: str) -> None:
    template = get_chat_template(name)
    image, audio = template.image_token, template.audio_token
    spoken = [
        {"role": "system", "content": "Look and listen."},
        {"role": "user", "content": f"What is{image}this, and this?{image}{audio}"},
        {"role": "assistant", "content": "A cat."},
        {"role": "user", "content": f"{audio}{image}And now?"},
    ]
    opened = template.get_prefix_and_suffix("assistant", spoken)[0]
    assert render(TALK, template) == Rendered(template.get_prompt(spoken) + opened, **MEDIA)


def test_image_tokens_as_the_models_were_trained() -> None:
    asked = [Message("user", [TALK[1].content[1], {"type": "text", "text": "Hi"}])]  # type: ignore[list-item]
    assert "user\n<image>\nHi<" in render(asked, get_chat_template("chatml-llava")).text
    spelled = "user\n<|vision_start|><|image_pad|><|vision_end|>Hi<"
    assert spelled in render(asked, get_chat_template("qwen2-vl")).text


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_an_open_turn_may_hold_media(role: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "x"}}
    for content, written in (
        ([image, {"type": "text", "text": "This is"}], "[image]This is"),
        ([{"type": "text", "text": "See"}, image], "See[image]"),
        ([image], "[image]"),
    ):
        talk = [Message("user", "U"), Message(role, content, open=True)]
        assert render(talk, PARTS).text == f"<user>U</user><{role}>{written}"


def test_the_format_is_that_of_the_text_which_is_rendered() -> None:
    sources = {"default": TEXT.sources["default"], "tool_use": PARTS.sources["default"]}
    both = JinjaChatTemplate(sources)
    assert (both.content_format, both.content_format_for(tools=True)) == ("string", "openai")
    tools = [{"type": "function", "function": {"name": "f"}}]
    asked = [TALK[1]]
    assert render(asked, both).text == "<user>What is this, and this?</user>"
    assert render(asked, both, tools=tools).text == "<user>What is[image]this,and this?[video][audio]</user>"
    turned = JinjaChatTemplate({"default": sources["tool_use"], "tool_use": sources["default"]})
    assert render(asked, turned, tools=tools).text == "<user>What is this, and this?</user>"
    assert (turned.content_format, turned.content_format_for(tools=True)) == ("openai", "string")


def test_a_template_of_parts_only_loses_no_text() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    )
    template = JinjaChatTemplate({"default": source})
    asked = [Message("system", "S"), Message("user", "U")]
    assert render(asked, template).text == "<system>S<user>U"
    assert render_prompt([*asked, Message("user", "V", open=True)], template) == "<system>S<user>U<user>V"
    assert render_prompt(conversation(asked), template) == "<system>S<user>U<assistant>"


def test_media_outside_of_turns() -> None:
    raw = [Message(RAW_ROLE, TALK[1].content)]
    assert render(raw, get_chat_template("chatml")).text == "What is<image>this, and this?<image><audio>"
    for template in (None, TEXT):
        with pytest.raises(TemplateError, match="must be in a turn") as caught:
            render(raw, template)
        assert caught.value.where == "messages[0].content[1]"


@pytest.mark.parametrize(
    "template", [PARTS, TEXT, get_chat_template("chatml")], ids=["parts", "text", "prefix"]
)
@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "hologram"}, "unknown type 'hologram'"),
        ({"type": ["text"]}, "unknown type"),
        ({"text": "a"}, "has no type"),
        ({}, "has no type"),
        ("bare", "must be an object, got str"),
        (None, "must be an object, got NoneType"),
    ],
)
def test_what_would_be_dropped_is_refused(template: Any, part: Any, said: str) -> None:
    talk = [Message("user", "U"), Message("user", [{"type": "text", "text": "a"}, part])]
    with pytest.raises(BadRequest, match=said) as caught:
        render(talk, template)
    assert caught.value.where == "messages[1].content[1]"
    assert isinstance(part, dict) is ("input_audio" in str(caught.value))  # the known types are named


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ["type", "text", "image_url", "video_url", "audio_url", "input_audio", "input_image", "url", "data"]
PART = JSON | st.dictionaries(st.sampled_from(KEYS), JSON | st.sampled_from(KEYS)) | st.sampled_from(
    [part for message in TALK for part in message.content if isinstance(part, dict)]
)  # fmt: skip


@settings(max_examples=tries(150), deadline=None)
@given(
    st.lists(
        st.builds(
            Message,
            st.sampled_from(["user", "assistant", "system", "tool", RAW_ROLE, "odd"]),
            JSON | st.lists(PART, max_size=4),
            name=st.none() | st.text(max_size=3),
        ),
        max_size=4,
    ),
    st.booleans(),
    st.sampled_from([PARTS, TEXT, get_chat_template("qwen2-vl"), None]),
)
def test_any_content_is_rendered_or_refused(messages: list[Message], opened: bool, template: Any) -> None:
    try:
        talk = conversation(messages) if opened else messages
        made = render(talk, template)
    except BadRequest:
        return
    assert isinstance(made.text, str)
    kinds = [
        part["type"] for message in messages if isinstance(message.content, list) for part in message.content
    ]
    assert len(made.images) == sum(kind in ("image_url", "input_image") for kind in kinds)
    assert len(made.videos) == kinds.count("video_url")
    assert len(made.audios) == sum(kind in ("audio_url", "input_audio") for kind in kinds)
    if isinstance(template, ChatTemplate):
        assert made.text.count(template.image_token) >= len(made.images) + len(made.videos)
