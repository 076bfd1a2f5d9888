from sglang_dsl.backends.blocking import SglSamplingParams
from sglang_dsl.backends.gemini import VertexAI

__all__ = ["SglSamplingParams", "VertexAI"]
