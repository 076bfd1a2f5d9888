"""Messages with text and media in each content format; malformed parts; what is never lost."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.formats.chat import process_content_for_template_format
from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import ImageData
from tests.exploring import tries

PICTURE = "https://example.org/a.png"
MIXED: dict[str, Any] = {
    "role": "user",
    "name": None,
    "tool_calls": [{"id": "1"}],
    "content": [
        {"type": "text", "text": "What is"},
        {"type": "image_url", "image_url": {"url": PICTURE}, "modalities": ["multi-images"]},
        "a bare string",
        {"type": "text", "text": "this?", "cache_control": None},
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64,AA", "detail": "low", "max_dynamic_patch": 6},
        },
        {"type": "video_url", "video_url": {"url": "https://example.org/a.mp4"}, "modalities": "video"},
        {"type": "audio_url", "audio_url": {"url": "https://example.org/a.mp3"}},
        {"type": "input_audio", "input_audio": {"data": "UklGRg==", "format": "mp3"}},
        {"type": "input_image", "image_url": {"url": "file:///b.png", "detail": "high"}},
        {"type": "input_image", "image_url": "https://example.org/c.png", "detail": "high"},
        {"type": "hologram", "text": "no part of this version"},
        {"text": "no type"},
        None,
        {"type": ["text"], "text": "odd"},
    ],
}
IMAGES = [
    ImageData(PICTURE),
    ImageData("data:image/png;base64,AA", "low", 6),
    ImageData("file:///b.png", "high"),
    ImageData("https://example.org/c.png", "high"),
]
MEDIA = (
    IMAGES,
    ["https://example.org/a.mp4"],
    ["https://example.org/a.mp3", "data:audio/mp3;base64,UklGRg=="],
    [["multi-images"], "video"],
)


def process(
    message: dict[str, Any], form: str, dpsk: bool = False, **more: Any
) -> tuple[dict[str, Any], Any]:
    lists: tuple[list[Any], ...] = ([], [], [], [])
    before = copy.deepcopy(message)
    made = process_content_for_template_format(message, form, *lists, dpsk, **more)
    assert message == before
    return made, lists


def test_parts() -> None:
    made, lists = process(MIXED, "openai")
    image = {"type": "image"}
    audio = {"type": "audio"}
    assert made == {
        "role": "user",
        "tool_calls": [{"id": "1"}],
        "content": [
            {"type": "text", "text": "What is"},
            image,
            {"type": "text", "text": "this?", "cache_control": None},
            image,
            {"type": "video"},
            audio,
            audio,
            image,
            image,
        ],
    }
    assert lists == MEDIA


def test_one_text() -> None:
    made, lists = process(MIXED, "string")
    assert made == {"role": "user", "tool_calls": [{"id": "1"}], "content": "What is this?"}
    assert lists == ([], [], [], [])


@pytest.mark.parametrize("form", ["openai", "string"])
def test_one_text_and_media(form: str) -> None:
    made, lists = process(MIXED, form, dpsk=True)
    assert made == {"role": "user", "tool_calls": [{"id": "1"}], "content": "What is this?"}
    assert lists == MEDIA


def test_lists_are_extended() -> None:
    images = [ImageData("https://example.org/0.png")]
    process_content_for_template_format(MIXED, "openai", images, [], [], [])
    assert images == [ImageData("https://example.org/0.png"), *IMAGES]


@pytest.mark.parametrize("form", ["openai", "string"])
@pytest.mark.parametrize("dpsk", [False, True])
def test_no_list(form: str, dpsk: bool) -> None:
    assert process({"role": "user", "content": "a"}, form, dpsk)[0] == {"role": "user", "content": "a"}
    assert process({"role": "assistant", "content": None, "x": 0}, form, dpsk)[0] == {
        "role": "assistant",
        "x": 0,
    }
    assert process({"role": "tool", "name": None}, form, dpsk)[0] == {"role": "tool"}


def test_empty_lists() -> None:
    assert process({"role": "user", "content": []}, "openai")[0] == {"role": "user", "content": []}
    assert process({"role": "user", "content": []}, "string")[0] == {"role": "user", "content": ""}
    assert process({"role": "user", "content": []}, "openai", dpsk=True)[0]["content"] == ""


@pytest.mark.parametrize("content", ["a", [{"type": "text", "text": "a"}]])
@pytest.mark.parametrize("form", ["", "OpenAI", "xml"])
def test_unknown_format(content: Any, form: str) -> None:
    with pytest.raises(ValueError, match=f"^Invalid content format: {form}$"):
        process({"role": "user", "content": content}, form)


TEXTS: list[tuple[Any, str, str]] = [
    ({"type": "text"}, '"text" must be a string; it is missing', ""),
    ({"type": "text", "text": 5}, '"text" must be a string; got int', ""),
    ({"type": "text", "text": ["a"]}, '"text" must be a string; got list', ""),
]
MALFORMED: list[tuple[Any, str, str]] = [
    *TEXTS,
    ({"type": "image_url"}, '"image_url" must be an object; it is missing', ""),
    ({"type": "image_url", "image_url": PICTURE}, '"image_url" must be an object; got str', ""),
    ({"type": "image_url", "image_url": {}}, '"url" must be a string; it is missing', ".image_url"),
    ({"type": "image_url", "image_url": {"url": ""}}, '"url" is empty', ".image_url"),
    (
        {"type": "image_url", "image_url": {"url": PICTURE, "detail": 1}},
        '"detail" must be a string',
        ".image_url",
    ),
    (
        {"type": "image_url", "image_url": {"url": PICTURE, "max_dynamic_patch": True}},
        '"max_dynamic_patch" must be a positive integer; got bool',
        ".image_url",
    ),
    ({"type": "image_url", "image_url": {"url": PICTURE}, "modalities": [1]}, '"modalities" must be', ""),
    ({"type": "input_image", "image_url": None}, '"image_url" must be an object', ""),
    ({"type": "video_url", "video_url": {"url": b"x"}}, '"url" must be a string; got bytes', ".video_url"),
    ({"type": "audio_url", "audio_url": [PICTURE]}, '"audio_url" must be an object; got list', ""),
    ({"type": "input_audio", "input_audio": {"format": "wav"}}, '"data" must be a string', ".input_audio"),
    ({"type": "input_audio", "input_audio": {"data": "AA", "format": 3}}, '"format" must be', ".input_audio"),
]


@pytest.mark.parametrize(("part", "said", "place"), MALFORMED)
@pytest.mark.parametrize("dpsk", [False, True])
def test_malformed_part(part: Any, said: str, place: str, dpsk: bool) -> None:
    message = {"role": "user", "content": [MIXED["content"][1], part]}
    lists: tuple[list[Any], ...] = ([], [], [], [])
    with pytest.raises(BadRequest) as caught:
        process_content_for_template_format(message, "openai", *lists, dpsk, index=3)
    assert said in caught.value.message
    assert caught.value.where == f"messages[3].content[1]{place}"
    assert lists == ([], [], [], [])


@pytest.mark.parametrize(("part", "said", "place"), TEXTS)
def test_malformed_text(part: Any, said: str, place: str) -> None:
    with pytest.raises(BadRequest) as caught:
        process({"role": "user", "content": [part]}, "string")
    assert (caught.value.where, caught.value.message) == ("content[0]", said)


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = ["text", "image_url", "video_url", "audio_url", "input_audio", "input_image", "url", "data", "detail",
        "format", "modalities", "max_dynamic_patch"]  # fmt: skip
PART = st.one_of(
    JSON,
    st.fixed_dictionaries(
        {"type": st.one_of(st.sampled_from(KEYS), JSON)},
        optional={
            key: st.one_of(JSON, st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, JSON)))
            for key in KEYS
        },
    ),
)


@settings(max_examples=tries(60), deadline=None)
@given(
    st.fixed_dictionaries(
        {"role": st.text(max_size=5), "content": st.one_of(JSON, st.lists(PART, max_size=4))}
    ),
    st.sampled_from(["openai", "string"]),
    st.booleans(),
)
def test_any_message_is_answered(message: dict[str, Any], form: str, dpsk: bool) -> None:
    """Processed or refused as a bad request, never anything else; and what was processed stays as it is."""
    try:
        made, _ = process(message, form, dpsk, index=0)
    except BadRequest as error:
        made, refused = {}, error.where or ""
    else:
        refused = "messages[0].content["
    assert refused.startswith("messages[0].content[")
    assert None not in made.values()
    if isinstance(made.get("content"), str):
        assert process(made, form, dpsk) == (made, ([], [], [], []))


@settings(max_examples=tries(60), deadline=None)
@given(st.lists(st.one_of(st.text().map(lambda text: {"type": "text", "text": text}), PART), max_size=6))
def test_no_text_is_lost(parts: list[Any]) -> None:
    texts = [
        part["text"]
        for part in parts
        if isinstance(part, dict) and part.get("type") == "text" and "text" in part
    ]
    message = {"role": "user", "content": parts}
    try:
        listed, _ = process(message, "openai")
        joined, _ = process(message, "string")
        encoded, _ = process(message, "openai", dpsk=True)
    except BadRequest:
        return
    assert [part["text"] for part in listed["content"] if part["type"] == "text"] == texts
    assert joined["content"] == encoded["content"] == " ".join(texts)
