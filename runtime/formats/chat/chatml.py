"""ChatML: `<|im_start|>role`, newline, the text, `<|im_end|>`. Hermes 2 and 3 write it, and many others."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import CHATML_TURNS, ChatTemplate

TEMPLATE = ChatTemplate("chatml", None, CHATML_TURNS, ("<|im_end|>",))
HERMES_3 = ChatTemplate("hermes-3", None, CHATML_TURNS, ("<|im_end|>",))

FAMILY = Family(
    marks=(
        Marks(
            "chatml",
            ("<|im_start|>", "<|im_end|>"),
            without=("<|im_sep|>",),
            tokens=("<|im_start|>", "<|im_end|>"),
        ),
    ),
    names=(
        Named("chatml", r"tinyllama"),
        Named("chatml", r"chatml"),
        Named("hermes-3", r"hermes-?[23](?!\d)"),
    ),
)
