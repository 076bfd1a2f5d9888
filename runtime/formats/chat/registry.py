"""The table of built-in chat templates. To add a family: one short file with a ChatTemplate, and one line
here.
"""

from __future__ import annotations

from runtime.formats.chat.template import ChatTemplate
from runtime.protocol.registry import Registry

CHAT_TEMPLATES: Registry[ChatTemplate] = Registry(
    "chat template",
    {
        "chatml": "runtime.formats.chat.chatml:TEMPLATE",
        "llama-3-instruct": "runtime.formats.chat.llama_3_instruct:TEMPLATE",
    },
)


def get_chat_template(name: str) -> ChatTemplate:
    """The template registered under `name`; UnknownName (a KeyError) lists the known ones."""
    return CHAT_TEMPLATES.load(name)
