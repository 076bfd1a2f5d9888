"""Llama 3 Instruct: a header with the role, an empty line, the text, `<|eot_id|>`. The tokenizer adds the
BOS.
"""

from __future__ import annotations

from runtime.formats.chat.template import ChatTemplate

TEMPLATE = ChatTemplate(
    name="llama-3-instruct",
    default_system_prompt=None,
    role_prefix_and_suffix={
        role: (f"<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")
        for role in ("system", "user", "assistant")
    },
    stop_str=("<|eot_id|>",),
    image_token="<|image|>",
)
