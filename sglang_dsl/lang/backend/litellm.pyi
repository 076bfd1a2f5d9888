from sglang_dsl.backends.blocking import SglSamplingParams
from sglang_dsl.backends.litellm import LiteLLM

__all__ = ["LiteLLM", "SglSamplingParams"]
