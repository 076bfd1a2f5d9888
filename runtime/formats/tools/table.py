"""The tool-call formats by name, and the format of a checkpoint by the text of its chat template. A new
format is a line here, or an entry point of an installed package."""

from __future__ import annotations

from collections.abc import Iterable

from runtime.formats.tools.base import BaseFormatDetector
from runtime.protocol.registry import Registry

_HERE = "runtime.formats.tools.formats"

FORMATS: Registry[BaseFormatDetector] = Registry(
    "tool-call format",
    {
        "cohere-command": f"{_HERE}:COMMAND",
        "deepseekv3": f"{_HERE}:V3",
        "deepseekv31": f"{_HERE}:V3_1",
        "deepseekv32": f"{_HERE}:V3_2",
        "gemma4": f"{_HERE}:GEMMA_4",
        "gigachat3": f"{_HERE}:GIGACHAT_3",
        "glm": f"{_HERE}:GLM_4_5",
        "glm45": f"{_HERE}:GLM_4_5",
        "glm47": f"{_HERE}:GLM_4_7",
        "gpt-oss": f"{_HERE}:GPT_OSS",
        "granite": f"{_HERE}:GRANITE",
        "granite4": f"{_HERE}:QWEN",
        "hermes": f"{_HERE}:HERMES",
        "hunyuan": f"{_HERE}:HUNYUAN",
        "interns1": f"{_HERE}:INTERN_S1",
        "kimi_k2": f"{_HERE}:KIMI_K2",
        "lfm2": f"{_HERE}:LFM_2",
        "llama3": f"{_HERE}:LLAMA_3",
        "mimo": f"{_HERE}:MIMO",
        "minicpm": f"{_HERE}:MINICPM",
        "minimax-m2": f"{_HERE}:MINIMAX_M2",
        "mistral": f"{_HERE}:MISTRAL",
        "mistral-compact": f"{_HERE}:MISTRAL_COMPACT",
        "olmo-3": f"{_HERE}:OLMO_3",
        "phi-4": f"{_HERE}:PHI_4",
        "pythonic": f"{_HERE}:PYTHONIC",
        "qwen": f"{_HERE}:QWEN",
        "qwen25": f"{_HERE}:QWEN",
        "qwen3_coder": f"{_HERE}:CODER",
        "step3": f"{_HERE}:STEP_3",
        "step3p5": f"{_HERE}:CODER",
        "trinity": f"{_HERE}:TRINITY",
    },
)

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
