"""Other libraries' ways to say things, and the engine behind other libraries' interfaces. One file each; what
needs an optional package is loaded when its name is asked for.

    chat              a chat request of another library, answered by any backend: what these are made of
    langchain, llama_index, dspy, lm_eval
                      models as these libraries have them
    pytest_plugin     fixtures for tests of programs
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.protocol.registry import Registry

if TYPE_CHECKING:
    from sglang_dsl.integrations.dspy import dspy_lm as dspy_lm
    from sglang_dsl.integrations.langchain import LangChainModel as LangChainModel
    from sglang_dsl.integrations.llama_index import LlamaIndexModel as LlamaIndexModel
    from sglang_dsl.integrations.lm_eval import LMEvalModel as LMEvalModel

_LATE: Registry[Any] = Registry(
    "integration",
    {
        "LMEvalModel": "sglang_dsl.integrations.lm_eval:LMEvalModel",
        "LangChainModel": "sglang_dsl.integrations.langchain:LangChainModel",
        "LlamaIndexModel": "sglang_dsl.integrations.llama_index:LlamaIndexModel",
        "dspy_lm": "sglang_dsl.integrations.dspy:dspy_lm",
    },
    extras={
        "LMEvalModel": "lm-eval",
        "LangChainModel": "langchain",
        "LlamaIndexModel": "llama-index",
        "dspy_lm": "dspy",
    },
)


def __getattr__(name: str) -> Any:
    """Raises MissingExtra where the library is not installed."""
    if _LATE.target(name) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _LATE.load(name)
