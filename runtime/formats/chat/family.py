"""A family of chat templates: the templates, and the marks and names by which a checkpoint is recognised.
Only the shape of the data; the search is in matching."""

from __future__ import annotations

import re
from dataclasses import dataclass

from runtime.formats.chat.template import ChatTemplate


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


@dataclass(frozen=True)
class Family:
    """Similar templates, and how to recognise a checkpoint that uses one of them."""

    templates: tuple[ChatTemplate, ...]
    marks: tuple[Marks, ...] = ()
    names: tuple[Named, ...] = ()
