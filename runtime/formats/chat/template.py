"""ChatTemplate: a model family's turns as a prefix and a suffix per role; and the marks and names by which a
checkpoint of the family is recognised.

Plain text in, plain text out. It knows no checkpoint, no tokenizer and no Jinja, and does not choose
templates.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any


class ChatTemplateStyle(Enum):
    """PLAIN: every turn is prefix + content + suffix, whatever came before.
    LLAMA2: the conversation's first system message opens the first user turn, which then has no prefix of its
    own."""

    PLAIN = auto()
    LLAMA2 = auto()


@dataclass(frozen=True)
class ChatTemplate:
    """How one family writes conversations.

    default_system_prompt   used for a system message whose content is None; None: such a message is omitted
    role_prefix_and_suffix  role -> (prefix, suffix); a role that is not listed has neither
    stop_str                strings that end a turn when the model writes one
    image_token             the text for an image; audio_token likewise

    A begin-of-text token is not part of a prefix: the tokenizer adds it.
    """

    name: str
    default_system_prompt: str | None
    role_prefix_and_suffix: Mapping[str, tuple[str, str]]
    stop_str: tuple[str, ...] = ()
    image_token: str = "<image>"
    audio_token: str = "<audio>"
    style: ChatTemplateStyle = field(default=ChatTemplateStyle.PLAIN)

    def get_prefix_and_suffix(self, role: str, hist_messages: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
        """The texts before and after a turn of `role` that follows `hist_messages`."""
        prefix, suffix = self.role_prefix_and_suffix.get(role, ("", ""))
        if self.style is ChatTemplateStyle.LLAMA2:
            if role == "system" and not hist_messages:
                return self.role_prefix_and_suffix.get("user", ("", ""))[0] + prefix, suffix
            match hist_messages:
                case [{"role": "system", "content": text}] if role == "user":
                    if text is not None or self.default_system_prompt is not None:
                        return "", suffix  # that message has opened the user's turn
        return prefix, suffix

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
            pieces.append(f"{prefix}{'' if content is None else content}{suffix}")
        return "".join(pieces)


def turns(
    system: tuple[str, str], user: tuple[str, str], assistant: tuple[str, str]
) -> dict[str, tuple[str, str]]:
    """role_prefix_and_suffix of the three usual roles."""
    return {"system": system, "user": user, "assistant": assistant}


def headed(before: str, after: str, end: str, assistant: str = "assistant") -> dict[str, tuple[str, str]]:
    """Turns that differ only in the role's name: `before` name `after` text `end`."""
    names = {"system": "system", "user": "user", "assistant": assistant}
    return {role: (f"{before}{name}{after}", end) for role, name in names.items()}


CHATML_TURNS: Mapping[str, tuple[str, str]] = headed("<|im_start|>", "\n", "<|im_end|>\n")
"""The turns of many families, each with its own default system prompt."""


def common_prefix(one: str, other: str) -> int:
    """The length of the texts' common prefix."""
    return len(os.path.commonprefix([one, other]))  # noqa: RUF071 - of characters


# -- families -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marks:
    """A checkpoint uses `template` if its Jinja text has every text of `jinja` and none of `without`. If a
    checkpoint has no Jinja text, every one of `tokens` must be among its special tokens (no `tokens`: such a
    checkpoint is not recognised). `types`: the model's type must be one of these (letters and digits, lower
    case: "gptoss").

    `ends`: tokens that end a turn of this format but no base checkpoint's text: a checkpoint that generates
    until such a token was trained to chat. Empty if base checkpoints stop at the same tokens.
    """

    template: str
    jinja: tuple[str, ...]
    without: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


@dataclass(frozen=True)
class Named:
    """Models whose name (the last component of a path or id) contains `pattern` use `template`. The pattern
    is searched in the lower-cased name and begins at the beginning of a word."""

    template: str
    pattern: str

    def search(self, name: str) -> re.Match[str] | None:
        return re.search(rf"(?<![a-z0-9])(?:{self.pattern})", name)


class Family:
    """Similar templates, and how to recognise a checkpoint that uses one of them."""

    def __init__(self, *entries: ChatTemplate | Marks | Named) -> None:
        self.templates = [one for one in entries if isinstance(one, ChatTemplate)]
        self.marks = [one for one in entries if isinstance(one, Marks)]
        self.names = [one for one in entries if isinstance(one, Named)]
