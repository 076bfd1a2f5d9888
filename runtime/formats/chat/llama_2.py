"""Llama 2 Chat: `[INST] ... [/INST]`, the system prompt inside the first user turn."""

from __future__ import annotations

from runtime.formats.chat.family import Family, Marks, Named
from runtime.formats.chat.template import ChatTemplate, ChatTemplateStyle, turns

TEMPLATE = ChatTemplate(
    "llama-2-chat",
    None,
    turns(("<<SYS>>\n", "\n<</SYS>>\n\n"), ("[INST] ", " [/INST]"), ("", " </s><s>")),
    style=ChatTemplateStyle.LLAMA2,
)

FAMILY = Family(
    marks=(Marks("llama-2-chat", ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")),),
    names=(Named("llama-2-chat", r"llama-?2(?![.\d]).*chat(?![a-z])|codellama.*instruct(?![a-z])"),),
)
