from runtime.formats.chat import (
    ChatTemplate,
    ChatTemplateStyle,
    get_chat_template,
    get_chat_template_by_model_path,
    register_chat_template,
    register_chat_template_matching_function,
)

__all__ = [
    "ChatTemplate", "ChatTemplateStyle", "get_chat_template", "get_chat_template_by_model_path",
    "register_chat_template", "register_chat_template_matching_function",
]  # fmt: skip
