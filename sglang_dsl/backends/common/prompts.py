"""Conversations for other providers' APIs, and HTTP errors as the language's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from runtime.protocol.messages import Message
from sglang_dsl.backends.base import Prompt
from sglang_dsl.backends.common.transport import HttpFault
from sglang_dsl.errors import BackendError, Unsupported

RETRYABLE = frozenset({408, 409, 429, 500, 502, 503, 504, 529})


def turns(prompt: Prompt, backend: str) -> tuple[list[Message], Message | None]:
    """A conversation's finished turns, and the assistant's open turn if it has text already. A prompt without
    turns is one turn of the user. Raises Unsupported for a prompt that chat APIs do not take."""
    whole = _only_text(prompt)
    if whole is not None:
        return [whole], None
    done: list[Message] = []
    for message in prompt.messages:
        if message.role == "raw":
            if isinstance(message.content, str) and not message.content.strip():
                continue
            raise Unsupported(
                f"{backend} supports only turns; the text {str(message.content)[:60]!r} is outside of a turn",
                hint="put it into user(...) or system(...)",
            )
        if not message.open:
            done.append(message)
            continue
        if message.role != "assistant":
            raise Unsupported(
                f"{backend} replies as the assistant; a turn of {message.role!r} is open",
                hint="generate inside assistant(...)",
            )
        return done, (message if message.content else None)
    raise Unsupported(
        f"{backend} replies only in an assistant turn; none is open",
        hint="generate inside assistant(...)",
    )


def _only_text(prompt: Prompt) -> Message | None:
    """A prompt that is text outside of turns, as a turn of the user; None for others."""
    if any(message.role != "raw" for message in prompt.messages):
        return None
    filled = [message for message in prompt.messages if message.content]
    if len(filled) != 1 or (isinstance(filled[0].content, str) and not filled[0].content.strip()):
        return None
    return Message("user", filled[0].content)


def arguments_of(text: str) -> dict[str, Any] | None:
    """The arguments of a model's call of a tool; None if they are no JSON object."""
    try:
        data = json.loads(text)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


@contextmanager
def faults(backend: str) -> Any:
    """An API's error answers as the language's errors."""
    try:
        yield
    except HttpFault as fault:
        match fault.body:
            case {"error": {"message": str(reason)}} | {"message": str(reason)} | {"error": str(reason)}:
                pass
            case other:
                reason = str(other)[:500].strip() or "no reason given"
        raise BackendError(
            f"the API answered {fault.status}: {reason}",
            backend=backend,
            status=fault.status,
            retryable=fault.status in RETRYABLE,
            hint="is the API key right?" if fault.status in (401, 403) else None,
        ) from fault


Part: TypeAlias = dict[str, Any]


def parts_of(
    message: Message,
    backend: str,
    text: Callable[[str], Part],
    image: Callable[[str, str, str | None], Part],
) -> list[Part]:
    """The parts of a turn, as an API takes them. `image`: of a URL, a media type and data in base64, which
    are "" and None if only the URL is known. Raises Unsupported for other media."""
    if isinstance(message.content, str):
        return [text(message.content)]
    parts = []
    for part in message.content:
        match part:
            case {"type": "text", "text": str(content)}:
                parts.append(text(content))
            case {"type": "image_url"}:
                source = part.get("image_url")
                url = source.get("url", "") if isinstance(source, Mapping) else str(source or "")
                # The URL may carry the data itself (RFC 2397).
                match = re.match(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)\Z", url, re.DOTALL)
                parts.append(image(url, *(match.groups() if match else ("", None))))
            case _:
                raise Unsupported(f"{backend} supports text and images, not {part.get('type')!r}")
    return parts
