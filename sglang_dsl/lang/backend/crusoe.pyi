from sglang_dsl.backends.crusoe import Crusoe

from sglang_dsl.backends.blocking import SglSamplingParams

__all__ = ["Crusoe", "SglSamplingParams"]
