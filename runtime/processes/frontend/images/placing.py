"""Pictures put into a prompt: each placeholder among its ids becomes as many as the picture has tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.processes.frontend.images.pictures import Picture
from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import ImageInput, Message


def check_slotss(ids: Sequence[int], image_id: int, count: int) -> None:
    """Raise BadRequest unless the prompt has as many placeholders as pictures."""
    places = sum([token == image_id for token in ids])
    if places != count:
        raise BadRequest(
            f"the prompt has {places} image placeholders, but {count} images were sent",
            where="images",
            hint="each image needs one placeholder; a chat template writes it for each image part",
        )


def lengthened(ids: Sequence[int], image_id: int, images: Sequence[ImageInput]) -> list[int]:
    """placed() where the pictures were placed before."""
    coming = iter(images)
    return [one for token in ids for one in [token] * (next(coming).length if token == image_id else 1)]


def placed(
    ids: Sequence[int], image_id: int, pictures: Sequence[Picture]
) -> tuple[list[int], list[ImageInput]]:
    """The longer ids, and where the pictures are in them. There are as many as placeholders."""
    made: list[int] = []
    images: list[ImageInput] = []
    coming = iter(pictures)
    for token in ids:
        if token != image_id:
            made.append(token)
            continue
        one = next(coming)
        extent = max(one.rows, one.columns)
        images.append(
            ImageInput(one.pixels, one.height, one.width, one.digest, len(made), one.tokens, extent)
        )
        made += [image_id] * one.tokens
    return made, images


def has_media(messages: Iterable[Message]) -> bool:
    """Whether there is anything but text in a conversation."""
    parts = (part for message in messages if isinstance(message.content, list) for part in message.content)
    return any(part.get("type") != "text" for part in parts)
