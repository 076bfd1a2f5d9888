"""SmolLM 2 and 3: ChatML. SmolLM3's own template puts a date and its modes before the system prompt; this one
does not.
"""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import CHATML_TURNS, ChatTemplate

_NAMED = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

SMOLLM_2 = ChatTemplate("smollm2", _NAMED, CHATML_TURNS, ("<|im_end|>",))
SMOLLM_3 = ChatTemplate("smollm3", None, CHATML_TURNS, ("<|im_end|>",))

_CHATML = ("<|im_start|>", "<|im_end|>")
FAMILY = Family(
    marks=(
        Marks("smollm2", (*_CHATML, _NAMED)),
        Marks(
            "smollm3",
            (*_CHATML, "## Metadata", "Reasoning Mode", "/no_think", "<think>", "</think>"),
        ),
    ),
    names=(Named("smollm2", r"smollm2.*instruct(?![a-z])"), Named("smollm3", r"smollm3")),
)
