"""A family of chat templates: the templates, and by which marks and names of a checkpoint it is known.

Only the data's shape; the search is in matching.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from runtime.formats.chat.template import ChatTemplate


@dataclass(frozen=True)
class Marks:
    """A checkpoint writes `template` if its Jinja text holds every text of `jinja` and none of `without`.

    If a checkpoint has no Jinja text, every one of `tokens` must be among its special tokens (no `tokens`:
    such a checkpoint is not recognised). `types`: and only if the model's type is one of these (letters and
    digits, lower case: "gptoss").

    `ends`: tokens that end a turn of this format and no base checkpoint's text: one that generates until such
    a token was trained to chat. Left empty if base checkpoints stop at the same tokens.
    """

    template: str
    jinja: tuple[str, ...]
    without: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()


@dataclass(frozen=True)
class Named:
    """Models whose name (the last component of a path or id) has `pattern` in it write `template`.

    The pattern is searched in the lower-cased name and begins at a word's beginning.
    """

    template: str
    pattern: str

    def search(self, name: str) -> re.Match[str] | None:
        return re.search(rf"(?<![a-z0-9])(?:{self.pattern})", name)


@dataclass(frozen=True)
class Family:
    """Templates that are alike, and how to know a checkpoint that writes one of them."""

    templates: tuple[ChatTemplate, ...]
    marks: tuple[Marks, ...] = ()
    names: tuple[Named, ...] = ()
