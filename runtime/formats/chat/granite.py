"""IBM Granite: the role between two marks; Granite 4 breaks the line after a turn."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import ChatTemplate, headed

GRANITE_3 = ChatTemplate(
    "granite-3-instruct",
    None,
    headed("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
    ("<|end_of_text|>",),
)
GRANITE_4 = ChatTemplate(
    "granite-4",
    None,
    headed("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>\n"),
    ("<|end_of_text|>",),
)

# The checkpoints of both versions break the line after a turn; so by checkpoint they are one format.
_ROLE = ("<|start_of_role|>", "<|end_of_role|>")
FAMILY = Family(
    marks=(Marks("granite-4", _ROLE, tokens=_ROLE),),
    names=(
        Named("granite-3-instruct", r"granite(?!-4).*instruct(?![a-z])"),
        Named("granite-4", r"granite-4"),
    ),
)
