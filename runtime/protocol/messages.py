"""Messages of a conversation as they travel, and the images that they refer to. Knows no template and no
model, and fetches nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from runtime.protocol.errors import BadRequest

RAW_ROLE = "raw"
"""A message with this role is text outside any turn: it stands in the prompt verbatim, between the turns."""
DETAILS = ("auto", "low", "high")


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of an assistant turn; `arguments` is a JSON object as text, as chat APIs carry it."""

    name: str
    arguments: str
    id: str | None = None


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One turn. `content` is text or a list of parts ({"type": "text", "text": ...}, ...).

    `open` marks the last turn as still being written: its text is a prefix and generation continues it.
    `continued`: somebody else than the model began it, so control tokens in it are only letters.
    `reasoning_content`: what the model thought before this reply; the chat template says whether it is shown.
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

    `url`: http(s), file, or a data URI; a text that is none of these is base64. `detail`: how finely a model
    should look ("auto", "low", "high"). `max_dynamic_patch`: tiles at most, for models that cut an image into
    tiles; None leaves it to the model.
    """

    url: str
    detail: str = "auto"
    max_dynamic_patch: int | None = None

    @classmethod
    def listed(cls, value: Any, where: str = "image_data") -> list[ImageData]:
        """Of `value`: a text, an object with a `url`, or a list of them; nothing. Raises BadRequest."""
        match value:
            case None | "":
                return []
            case list() | tuple():
                return [one for at, part in enumerate(value) for one in cls.listed(part, f"{where}[{at}]")]
            case ImageData():
                return [value]
            case str():
                return [cls(value)]
            case {**fields}:
                try:
                    return [msgspec.convert(fields, cls)]
                except msgspec.ValidationError as error:
                    raise BadRequest(str(error), where=where) from error
            case _:
                raise BadRequest(
                    f"an image must be a string or an object with a url, got {type(value).__name__}",
                    where=where,
                )


class ImageInput(msgspec.Struct, frozen=True, weakref=True):
    """A picture of a prompt, ready for the model.

    pixels    uint8 [height, width, 3], red, green, blue; empty where a request before it, of the same
              message, has the same picture
    digest    of the size and the pixels; who has the same one is the same picture
    first     place in the prompt's ids of the first of the `length` tokens that stand for it
    extent    how many positions they take together for the rotary embedding
    number    how the scheduler names it; 0: not yet
    """

    pixels: bytes
    height: int
    width: int
    digest: bytes
    first: int
    length: int
    extent: int
    number: int = 0
