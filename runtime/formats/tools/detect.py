"""Detects the tool-call format of a checkpoint by the text of its chat template."""

from __future__ import annotations

from collections.abc import Iterable

# (marks, format): the format if a template contains all marks; the first match is used.
_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<｜DSML｜",), "deepseekv32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseekv3"),
    (("<｜tool▁calls▁begin｜>",), "deepseekv31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|channel|>", "commentary"), "gpt-oss"),
    (("<minimax:tool_call>",), "minimax-m2"),
    (("steptml:invoke",), "step3"),
    (("<|tool_call>call:",), "gemma4"),
    (("<|action_start|>", "<|plugin|>"), "interns1"),
    (("function call<|role_sep|>",), "gigachat3"),
    (("<|START_ACTION|>",), "cohere-command"),
    (("<arg_key>", "<arg_value>", "\n<arg_key>"), "glm45"),
    (("<arg_key>", "<arg_value>"), "glm47"),
    (("<tool_call>", "<function=", "<parameter="), "qwen3_coder"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral-compact"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call_start|>", "```python"), "minicpm"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<function_calls>",), "olmo-3"),
    (("<tool_calls>", "<tool_call>"), "hunyuan"),
    (("<|tool_call|>", "<|/tool_call|>"), "phi-4"),
    (("functools[",), "phi-4"),
    (("<|tool_call|>",), "granite"),
    (("<|python_start|>",), "pythonic"),
    (("<tool_call>\\n",), "qwen25"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3"),
    (('{"name": function name, "parameters": dictionary',), "llama3"),
)


def tool_format_of(templates: Iterable[str]) -> tuple[str, str] | None:
    """(format, the matching marks) for a checkpoint's template texts; None if they have no calls."""
    text = "\n".join(templates)
    for marks, name in _MARKS:
        if all(mark in text for mark in marks):
            return name, " and ".join(map(repr, marks))
    return None
