"""Grok 2: `Human:` and `Assistant:` with a separator between turns."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import ChatTemplate, turns

_SEPARATOR = "<|separator|>"

TEMPLATE = ChatTemplate(
    "grok-2",
    None,
    turns(
        ("System: ", f"{_SEPARATOR}\n\n"),
        ("Human: ", f"{_SEPARATOR}\n\n"),
        ("Assistant:", f"{_SEPARATOR}\n\n"),
    ),
    (_SEPARATOR,),
)

FAMILY = Family(
    marks=(Marks("grok-2", ("Human: ", "Assistant:", _SEPARATOR)),),
    names=(Named("grok-2", r"grok-2(?!\d)"),),
)
