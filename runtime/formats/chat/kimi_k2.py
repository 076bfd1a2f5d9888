"""Kimi K2: a mark for the kind of turn, its name, and a mark before the text."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import ChatTemplate, turns

TEMPLATE = ChatTemplate(
    "kimi-k2",
    "You are a helpful assistant",
    turns(
        ("<|im_system|>system<|im_middle|>", "<|im_end|>"),
        ("<|im_user|>user<|im_middle|>", "<|im_end|>"),
        ("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
    ),
    ("<|im_end|>",),
)

FAMILY = Family(
    marks=(
        Marks(
            "kimi-k2",
            ("<|im_middle|>", "<|im_end|>"),
            tokens=("<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
        ),
    ),
    names=(Named("kimi-k2", r"kimi-k2"),),
)
