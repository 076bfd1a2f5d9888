"""Zephyr: `<|role|>` on a line, the text, `</s>`. TinyLlama Chat 1.0 and StableLM Zephyr write it too."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import ChatTemplate, headed

TEMPLATE = ChatTemplate("zephyr", None, headed("<|", "|>\n", "</s>\n"), ("</s>",))

FAMILY = Family(
    marks=(Marks("zephyr", (r"'<|user|>\n' + message['content'] + eos_token",)),),
    names=(Named("zephyr", r"zephyr-7b"),),
)
