from sglang_dsl.backends.blocking import SglSamplingParams
from sglang_dsl.backends.openai import OpenAI

__all__ = ["OpenAI", "SglSamplingParams"]
