"""ChatML rendering of conversations, in Python and as the Jinja template of the checkpoint.

Both must print the same text (a test compares them). Knows nothing of tasks, tokens or splits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = ["CHAT_TEMPLATE", "END", "Message", "render", "segments"]

Message = dict[str, Any]
END = "<|im_end|>"

_TOOLS_HEAD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_TAIL = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)

# Append-only: what is printed for a message depends on earlier messages only, so the text of a longer
# conversation extends the text of a shorter one (each tool message is a user turn of its own).
CHAT_TEMPLATE = (
    (
        "{%- set first = messages[0] if messages else none %}"
        "{%- set lead = first.content if first and first.role == 'system' else '' %}"
        "{%- if tools %}"
        "{{- '<|im_start|>system\\n' + (lead + '\\n\\n' if lead else '') + TOOLS_HEAD }}"
        "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
        "{{- TOOLS_TAIL + '<|im_end|>\\n' }}"
        "{%- elif first and first.role == 'system' %}"
        "{{- '<|im_start|>system\\n' + lead + '<|im_end|>\\n' }}"
        "{%- endif %}"
        "{%- for message in messages %}"
        "{%- if message.role == 'tool' %}"
        "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}"
        "{{- '\\n</tool_response><|im_end|>\\n' }}"
        "{%- elif message.role == 'system' and loop.first %}"
        "{%- else %}"
        "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
        "{%- for call in message.tool_calls or [] %}"
        "{%- set function = call.function if call.function else call %}"
        "{{- '\\n' if message.content or not loop.first else '' }}"
        '{{- \'<tool_call>\\n{"name": "\' + function.name'
        ' + \'", "arguments": \' }}'
        "{{- function.arguments if function.arguments is string else (function.arguments | tojson) }}"
        "{{- '}\\n</tool_call>' }}"
        "{%- endfor %}"
        "{{- '<|im_end|>\\n' }}"
        "{%- endif %}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    .replace("TOOLS_HEAD", repr(_TOOLS_HEAD))
    .replace("TOOLS_TAIL", repr(_TOOLS_TAIL))
)


def segments(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[tuple[str, bool]]:
    """The conversation's text in pieces, each with whether the assistant writes it."""
    rest = list(messages)
    lead = str(rest.pop(0)["content"]) if rest and rest[0]["role"] == "system" else None
    pieces: list[tuple[str, bool]] = []
    if tools:
        listed = "".join("\n" + json.dumps(tool) for tool in tools)
        lead = (lead + "\n\n" if lead else "") + _TOOLS_HEAD + listed + _TOOLS_TAIL
    if lead is not None:
        pieces.append((f"<|im_start|>system\n{lead}{END}\n", False))
    for message in rest:
        role, text = message["role"], message["content"]
        if role == "assistant":
            pieces += [("<|im_start|>assistant\n", False), (text + END, True), ("\n", False)]
        elif role == "tool":
            wrapped = f"<tool_response>\n{text}\n</tool_response>"
            pieces.append((f"<|im_start|>user\n{wrapped}{END}\n", False))
        else:
            pieces.append((f"<|im_start|>{role}\n{text}{END}\n", False))
    return pieces


def render(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = (), prompt: bool = True) -> str:
    """The text of a conversation whose tool calls are plain assistant text; `prompt` opens a reply."""
    text = "".join(piece for piece, _ in segments(messages, tools))
    return text + "<|im_start|>assistant\n" if prompt else text
