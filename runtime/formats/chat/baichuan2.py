"""Baichuan 2 Chat: two reserved tokens, one before each side's text."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import ChatTemplate, turns

TEMPLATE = ChatTemplate(
    "baichuan2",
    None,
    turns(("", ""), ("<reserved_106>", ""), ("<reserved_107>", "")),
    ("<reserved_106>", "<reserved_107>", "</s>"),
)

_MARKS = ("<reserved_106>", "<reserved_107>")
FAMILY = Family(
    marks=(Marks("baichuan2", _MARKS, tokens=_MARKS),),
    names=(Named("baichuan2", r"baichuan-?2.*chat(?![a-z])"),),
)
