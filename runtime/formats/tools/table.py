"""The tool-call formats by name. A new one is a line here, or an entry point of an installed package."""

from __future__ import annotations

from runtime.formats.tools.base import BaseFormatDetector
from runtime.protocol.registry import Registry

_HERE = "runtime.formats.tools.formats"

FORMATS: Registry[BaseFormatDetector] = Registry(
    "tool-call format",
    {
        "cohere-command": f"{_HERE}.declared:COMMAND",
        "deepseekv3": f"{_HERE}.deepseek:V3",
        "deepseekv31": f"{_HERE}.deepseek:V3_1",
        "deepseekv32": f"{_HERE}.deepseek:V3_2",
        "gemma4": f"{_HERE}.gemma:GEMMA_4",
        "gigachat3": f"{_HERE}.declared:GIGACHAT_3",
        "glm": f"{_HERE}.declared:GLM_4_5",
        "glm45": f"{_HERE}.declared:GLM_4_5",
        "glm47": f"{_HERE}.declared:GLM_4_7",
        "gpt-oss": f"{_HERE}.harmony:GPT_OSS",
        "granite": f"{_HERE}.declared:GRANITE",
        "granite4": f"{_HERE}.qwen:QWEN",
        "hermes": f"{_HERE}.qwen:HERMES",
        "hunyuan": f"{_HERE}.declared:HUNYUAN",
        "interns1": f"{_HERE}.declared:INTERN_S1",
        "kimi_k2": f"{_HERE}.kimi:KIMI_K2",
        "lfm2": f"{_HERE}.declared:LFM_2",
        "llama3": f"{_HERE}.declared:LLAMA_3",
        "mimo": f"{_HERE}.qwen:MIMO",
        "minicpm": f"{_HERE}.declared:MINICPM",
        "minimax-m2": f"{_HERE}.declared:MINIMAX_M2",
        "mistral": f"{_HERE}.declared:MISTRAL",
        "mistral-compact": f"{_HERE}.declared:MISTRAL_COMPACT",
        "olmo-3": f"{_HERE}.declared:OLMO_3",
        "phi-4": f"{_HERE}.declared:PHI_4",
        "pythonic": f"{_HERE}.declared:PYTHONIC",
        "qwen": f"{_HERE}.qwen:QWEN",
        "qwen25": f"{_HERE}.qwen:QWEN",
        "qwen3_coder": f"{_HERE}.qwen:CODER",
        "step3": f"{_HERE}.declared:STEP_3",
        "step3p5": f"{_HERE}.qwen:CODER",
        "trinity": f"{_HERE}.qwen:TRINITY",
    },
)
