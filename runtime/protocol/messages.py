"""Messages of a conversation, and their images. Knows no template and no model, and fetches nothing."""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.protocol.errors import BadRequest

RAW_ROLE = "raw"
"""A message with this role is text outside any turn: it is put into the prompt as it is."""
DETAILS = ("auto", "low", "high")


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of an assistant turn; `arguments` is a JSON object as text, as chat APIs carry it."""

    name: str
    arguments: str
    id: str | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn. `content` is text or a list of parts ({"type": "text", "text": ...}, ...).

    `open`: the last turn, which generation continues. `continued`: the model did not begin that turn, so
    control tokens in it are read as letters. `reasoning_content`: the model's reasoning before this reply;
    the chat template decides whether it is shown.
    """

    role: str
    content: str | list[dict[str, Any]] = ""
    open: bool = False
    continued: bool = False
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ImageData(msgspec.Struct, frozen=True, omit_defaults=True):
    """One image of a message.

    `url`: http(s), file, or a data URI; anything else is base64. `detail`: the resolution ("auto", "low",
    "high"). `max_dynamic_patch`: the most tiles, for models that cut images into tiles; None: the model's.
    """

    url: str
    detail: str = "auto"
    max_dynamic_patch: int | None = None

    @classmethod
    def listed(cls, value: Any, field: str = "image_data") -> list[ImageData]:
        """The images of a text, an object with a `url`, a list of them, or None. Raises BadRequest."""
        match value:
            case None | "":
                return []
            case list() | tuple():
                return [one for at, part in enumerate(value) for one in cls.listed(part, f"{field}[{at}]")]
            case ImageData():
                return [value]
            case str():
                return [cls(value)]
            case {**fields}:
                try:
                    return [msgspec.convert(fields, cls)]
                except msgspec.ValidationError as error:
                    raise BadRequest(str(error), where=field) from error
            case _:
                raise BadRequest(
                    f"an image must be a string or an object with a url, got {type(value).__name__}",
                    where=field,
                )


class ImageInput(msgspec.Struct, frozen=True, weakref=True):
    """A picture of a prompt, ready for the model.

    pixels    uint8 [height, width, 3], red, green, blue; empty if an earlier request of the same message has
              the same picture
    digest    of the size and the pixels, which identifies the picture
    first     index in the prompt's ids of the first of its `length` tokens
    extent    positions that they take together for the rotary embedding
    number    in the scheduler; 0: none yet
    """

    pixels: bytes
    height: int
    width: int
    digest: bytes
    first: int
    length: int
    extent: int
    number: int = 0
