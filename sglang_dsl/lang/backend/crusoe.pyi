from sglang_dsl.backends.blocking import SglSamplingParams
from sglang_dsl.backends.crusoe import Crusoe

__all__ = ["Crusoe", "SglSamplingParams"]
