"""Chat formats: templates by name, by checkpoint and by Jinja. What needs jinja2 is loaded on first use.

`processes/checkpoint/templates.py` chooses the template of an engine. A Jinja template renders the
turns itself; the prefixes and suffixes derived from it (`formats/chat/derive.py`) only describe it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from runtime.formats.chat.completion import (
    CompletionTemplate,
    HoleAt,
    completion_template_registry,
    get_completion_template,
    register_completion_template,
)
from runtime.formats.chat.content import process_content_for_template_format
from runtime.formats.chat.matching import (
    UnknownChatTemplate,
    get_chat_template_by_model_path,
    match_checkpoint,
    register_chat_template_matching_function,
)
from runtime.formats.chat.registry import chat_template_registry, get_chat_template, register_chat_template
from runtime.formats.chat.render import Rendered, conversation, render_prompt
from runtime.formats.chat.template import ChatTemplate, ChatTemplateStyle

if TYPE_CHECKING:
    from runtime.formats.chat.derive import derive_chat_template
    from runtime.formats.chat.files import load_chat_template
    from runtime.formats.chat.jinja import detect_jinja_template_content_format

_LAZY = {
    "derive_chat_template": "derive",
    "detect_jinja_template_content_format": "jinja",
    "load_chat_template": "files",
}

__all__ = [
    "ChatTemplate",
    "ChatTemplateStyle",
    "CompletionTemplate",
    "HoleAt",
    "Rendered",
    "UnknownChatTemplate",
    "chat_template_registry",
    "completion_template_registry",
    "conversation",
    "derive_chat_template",
    "detect_jinja_template_content_format",
    "get_chat_template",
    "get_chat_template_by_model_path",
    "get_completion_template",
    "load_chat_template",
    "match_checkpoint",
    "process_content_for_template_format",
    "register_chat_template",
    "register_chat_template_matching_function",
    "register_completion_template",
    "render_prompt",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
