from sglang_dsl.backends.anthropic import Anthropic
from sglang_dsl.backends.blocking import SglSamplingParams

__all__ = ["Anthropic", "SglSamplingParams"]
