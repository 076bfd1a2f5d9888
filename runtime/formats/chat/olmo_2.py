"""OLMo 2: `<|role|>`, a line break, the text; only a reply ends with a mark."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import ChatTemplate, turns

TEMPLATE = ChatTemplate(
    "olmo-2",
    None,
    turns(("<|system|>\n", "\n"), ("<|user|>\n", "\n"), ("<|assistant|>\n", "<|endoftext|>\n")),
    ("<|endoftext|>",),
)

FAMILY = Family(
    marks=(
        Marks(
            "olmo-2",
            ("<|assistant|>", "bos_token", "eos_token"),
            without=("<|end|>", "[gMASK]", "</s>", "<|im_start|>"),
            types=("olmo2",),
        ),
    ),
    names=(Named("olmo-2", r"olmo-2.*(?:instruct|sft|dpo)(?![a-z])"),),
)
