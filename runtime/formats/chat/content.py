"""Converts a message's content to the shape that its template reads: parts for "openai", one text for
"string".

It moves media from the parts to the request's lists. It fetches nothing and knows no template.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import ImageData

CONTENT_FORMATS = ("openai", "string")


def process_content_for_template_format(
    msg_dict: Mapping[str, Any],
    content_format: str,
    image_data: list[ImageData],
    video_data: list[str],
    audio_data: list[str],
    modalities: list[Any],
    use_dpsk_v32_encoding: bool = False,
    *,
    index: int | None = None,
) -> dict[str, Any]:
    """A copy of the message without keys that are None, with its content in the format's shape.

    Content that is not a list is unchanged. A list becomes, for "openai", the parts: text unchanged,
    image_url and input_image {"type": "image"}, video_url {"type": "video"}, audio_url and input_audio
    {"type": "audio"}; their sources are appended to the lists, and so is a part's own "modalities". For
    "string" it becomes the text parts joined with one space, and media are ignored. DeepSeek-V3.2's encoding
    uses the joined text, and media are appended nevertheless.

    Dropped in any format: parts of other types, and parts that are not objects (including bare strings).
    index: the message's index in its request, for errors. Raises ValueError for an unknown format; BadRequest
    naming `messages[i].content[j]` for a malformed part of a known type. The lists are unchanged then; the
    message is never changed.
    """
    if content_format not in CONTENT_FORMATS:
        raise ValueError(f"Invalid content format: {content_format}")
    kept = {key: value for key, value in msg_dict.items() if value is not None}
    content = kept.get("content")
    if not isinstance(content, list):
        return kept
    reads_media = use_dpsk_v32_encoding or content_format == "openai"
    texts: list[str] = []
    parts: list[dict[str, Any]] = []
    media: dict[str, list[Any]] = {"image": [], "video": [], "audio": [], "modalities": []}
    for at, part in enumerate(content):
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        path = f"content[{at}]" if index is None else f"messages[{index}].content[{at}]"
        if kind == "text":
            texts.append(_required(part, "text", path))
            parts.append(dict(part))
        elif reads_media and isinstance(kind, str) and kind in MEDIA_SLOTS:
            slot = MEDIA_SLOTS[kind]
            media[slot].append(_source(part, kind, path))
            parts.append({"type": slot})
            if (one := _modalities(part, path)) is not None:
                media["modalities"].append(one)
    lists: tuple[list[Any], ...] = (image_data, video_data, audio_data, modalities)
    for target, more in zip(lists, media.values(), strict=True):
        target.extend(more)
    as_parts = content_format == "openai" and not use_dpsk_v32_encoding
    return {**kept, "content": parts if as_parts else " ".join(texts)}


def _source(part: Mapping[str, Any], kind: str, path: str) -> ImageData | str:
    """The source of a part with media. An input_image may have its URL and detail at the top level, and an
    input_audio {"data": base64, "format": "wav"} becomes a data URI."""
    if kind == "input_image":
        kind = "image_url"
        if isinstance(part.get(kind), str):
            part = {kind: {**part, "url": part[kind]}}
    source = part.get(kind)
    if not isinstance(source, dict):
        raise _malformed(kind, "an object", source, path)
    path = f"{path}.{kind}"
    if kind == "image_url":
        detail, patches = source.get("detail"), source.get("max_dynamic_patch")
        if not isinstance(detail, str | None):
            raise _malformed("detail", "a string", detail, path)
        if patches is not None and (type(patches) is not int or patches < 1):
            raise _malformed("max_dynamic_patch", "a positive integer", patches, path)
        return ImageData(_required(source, "url", path), detail or "auto", patches)
    if kind != "input_audio":
        return _required(source, "url", path)
    data = _required(source, "data", path)
    if data.startswith(("data:", "http://", "https://", "file://")):
        return data
    form = source.get("format")
    if not isinstance(form, str | None):
        raise _malformed("format", "a string", form, path)
    return f"data:audio/{form or 'wav'};base64,{data}"


MEDIA_SLOTS: Mapping[str, str] = {
    "image_url": "image",
    "input_image": "image",
    "video_url": "video",
    "audio_url": "audio",
    "input_audio": "audio",
}
"""Type of a part -> its kind of media."""
PART_TYPES = ("text", *MEDIA_SLOTS)


def check_parts(content: Any, index: int) -> None:
    """Refuse parts that `process_content_for_template_format` would drop: nothing in a request may be lost.
    Raises BadRequest naming `messages[index].content[j]`, the type there and the known types."""
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        problem = f"must be a text or a list of parts, got {type(content).__name__}"
        raise BadRequest(problem, where=f"messages[{index}].content")
    for at, part in enumerate(content):
        path = f"messages[{index}].content[{at}]"
        if not isinstance(part, dict):
            raise BadRequest(
                f"must be an object, got {type(part).__name__}", where=path, hint=_SHAPES["text"]
            )
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in PART_TYPES:
            problem = "has no type" if kind is None else f"is of the unknown type {kind!r:.60}"
            raise BadRequest(f"the part {problem}; known: {', '.join(PART_TYPES)}", where=path)


def check_media(content: Any, index: int, takes: Container[str]) -> None:
    """Refuse media that a model does not support. `takes`: the supported ones of "image", "video" and
    "audio". Raises BadRequest naming the part. Other parts are ignored."""
    if not isinstance(content, list):
        return
    for at, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        slot = MEDIA_SLOTS.get(kind) if isinstance(kind, str) else None
        if slot is not None and slot not in takes:
            supported = [name for name in ("image", "video", "audio") if name in takes]
            raise BadRequest(
                f"this model takes text {'and ' + ', '.join(supported) if supported else 'only'}, "
                f"got a part of type {kind!r}",
                where=f"messages[{index}].content[{at}]",
                hint="leave the part out, or use a model that takes it",
            )


def _modalities(part: Mapping[str, Any], path: str) -> str | list[str] | None:
    match part.get("modalities"):
        case None | "" | []:
            return None
        case str(one):
            return one
        case [*several] if all(isinstance(one, str) for one in several):
            return list(several)
        case other:
            raise _malformed("modalities", "a string or a list of strings", other, path)


def _required(source: Mapping[str, Any], key: str, path: str) -> str:
    value = source.get(key)
    if not isinstance(value, str):
        raise _malformed(key, "a string", value, path)
    if not value and key != "text":
        raise BadRequest(f'"{key}" is empty', where=path)
    return value


def _malformed(key: str, expected: str, value: Any, path: str) -> BadRequest:
    problem = "it is missing" if value is None else f"got {type(value).__name__}"
    return BadRequest(f'"{key}" must be {expected}; {problem}', where=path, hint=_SHAPES.get(key))


_SHAPES: Mapping[str, str] = {
    "image_url": 'write {"type": "image_url", "image_url": {"url": "https://..."}}',
    "video_url": 'write {"type": "video_url", "video_url": {"url": "https://..."}}',
    "audio_url": 'write {"type": "audio_url", "audio_url": {"url": "https://..."}}',
    "input_audio": 'write {"type": "input_audio", "input_audio": {"data": "<base64>", "format": "wav"}}',
    "text": 'write {"type": "text", "text": "..."}',
}
