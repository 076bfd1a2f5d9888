"""Media that a message refers to, as they travel. Fetches and decodes nothing."""

from __future__ import annotations

import msgspec


class ImageData(msgspec.Struct, frozen=True, omit_defaults=True):
    """One image of a message.

    `url`: http(s), file, or a data URI. `detail`: how finely a model should look ("auto", "low", "high").
    `max_dynamic_patch`: tiles at most, for models that cut an image into tiles; None leaves it to the model.
    """

    url: str
    detail: str = "auto"
    max_dynamic_patch: int | None = None
