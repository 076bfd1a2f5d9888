"""Puts pictures into a prompt: each placeholder among its ids becomes as many as the picture has tokens."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.processes.frontend.images.pictures import Picture
from runtime.protocol.errors import BadRequest
from runtime.protocol.messages import ImageInput


def check_placeholders(ids: Sequence[int], image_id: int, count: int) -> None:
    """Raise BadRequest unless the prompt has as many placeholders as pictures."""
    placeholders = sum([token == image_id for token in ids])
    if placeholders != count:
        raise BadRequest(
            f"the prompt has {placeholders} image placeholders, but {count} images were sent",
            where="images",
            hint="each image needs one placeholder; a chat template writes it for each image part",
        )


def expand(ids: Sequence[int], image_id: int, images: Sequence[ImageInput]) -> list[int]:
    """The ids with placeholders for pictures that put_pictures() has measured."""
    coming = iter(images)
    return [one for token in ids for one in [token] * (next(coming).length if token == image_id else 1)]


def put_pictures(
    ids: Sequence[int], image_id: int, pictures: Sequence[Picture]
) -> tuple[list[int], list[ImageInput]]:
    """The longer ids, and the pictures with their positions in them. There are as many as placeholders."""
    longer: list[int] = []
    images: list[ImageInput] = []
    coming = iter(pictures)
    for token in ids:
        if token != image_id:
            longer.append(token)
            continue
        one = next(coming)
        extent = max(one.rows, one.columns)
        images.append(
            ImageInput(one.pixels, one.height, one.width, one.digest, len(longer), one.tokens, extent)
        )
        longer += [image_id] * one.tokens
    return longer, images
