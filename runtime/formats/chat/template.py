"""ChatTemplate: a model family's turns as a prefix and a suffix per role.

Plain text in, plain text out. It knows no checkpoint, no tokenizer and no Jinja; which template belongs to
which checkpoint is not its business either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


class ChatTemplateStyle(Enum):
    """PLAIN: every turn is prefix + content + suffix, whatever came before."""

    PLAIN = auto()


@dataclass(frozen=True)
class ChatTemplate:
    """How one family writes conversations.

    default_system_prompt  used for a system message whose content is None; None: such a message is left out
    role_prefix_and_suffix role -> (prefix, suffix); a role that is not listed has neither
    stop_str               strings that end a turn when the model writes one
    """

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: Mapping[str, tuple[str, str]]
    stop_str: tuple[str, ...] = ()
    image_token: str = "<image>"
    audio_token: str = "<audio>"
    style: ChatTemplateStyle = field(default=ChatTemplateStyle.PLAIN)

    def get_prefix_and_suffix(self, role: str, hist_messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """What stands before and after a turn of `role` that follows `hist_messages`."""
        return self.role_prefix_and_suffix.get(role, ("", ""))

    def get_prompt(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of whole turns, each a mapping with "role" and "content". Opens no reply."""
        pieces: list[str] = []
        for index, message in enumerate(messages):
            role, content = message["role"], message["content"]
            if role == "system" and content is None:
                content = self.default_system_prompt
                if content is None:
                    continue
            prefix, suffix = self.get_prefix_and_suffix(role, messages[:index])
            pieces.append(f"{prefix}{content}{suffix}")
        return "".join(pieces)
