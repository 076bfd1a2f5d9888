"""ChatML: `<|im_start|>role`, newline, the text, `<|im_end|>`. Qwen, Yi and many fine-tunes write it."""

from __future__ import annotations

from runtime.formats.chat.template import ChatTemplate

TEMPLATE = ChatTemplate(
    name="chatml",
    default_system_prompt=None,
    role_prefix_and_suffix={
        role: (f"<|im_start|>{role}\n", "<|im_end|>\n") for role in ("system", "user", "assistant")
    },
    stop_str=("<|im_end|>",),
)
