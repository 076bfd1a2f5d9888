"""Messages of a conversation as they travel. Knows no template and no model."""

from __future__ import annotations

from typing import Any

import msgspec

RAW_ROLE = "raw"
"""A message with this role is text outside any turn: it stands in the prompt verbatim, between the turns."""


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
