"""Llama 4: as Llama 3, with shorter marks."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import ChatTemplate, headed

TEMPLATE = ChatTemplate(
    "llama-4",
    None,
    headed("<|header_start|>", "<|header_end|>\n\n", "<|eot|>"),
    ("<|eot|>",),
    image_token="<|image|>",
)

_HEADER = ("<|header_start|>", "<|header_end|>", "<|eot|>")
FAMILY = Family(
    marks=(Marks("llama-4", _HEADER, tokens=_HEADER),),
    names=(Named("llama-4", r"llama-?4(?!\d).*instruct(?![a-z])"),),
)
