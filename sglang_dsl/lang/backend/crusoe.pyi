from sglang_dsl.backends.blocking import SglSamplingParams
from sglang_dsl.backends.openai import Crusoe

__all__ = ["Crusoe", "SglSamplingParams"]
