"""The engine behind other libraries' interfaces, and programs in pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runtime.protocol.registry import Registry

if TYPE_CHECKING:
    from sglang_dsl.integrations.dspy import dspy_lm as dspy_lm
    from sglang_dsl.integrations.langchain import LangChainModel as LangChainModel
    from sglang_dsl.integrations.llama_index import LlamaIndexModel as LlamaIndexModel
    from sglang_dsl.integrations.lm_eval import LMEvalModel as LMEvalModel

_EXTRAS = {
    "LMEvalModel": "lm-eval",
    "LangChainModel": "langchain",
    "LlamaIndexModel": "llama-index",
    "dspy_lm": "dspy",
}
_LATE: Registry[Any] = Registry(
    "integration",
    {name: f"{__name__}.{extra.replace('-', '_')}:{name}" for name, extra in _EXTRAS.items()},
    extras=_EXTRAS,
)


def __getattr__(name: str) -> Any:
    """Loads the name on first use. Raises MissingExtra if its library is not installed."""
    if _LATE.target(name) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _LATE.load(name)
