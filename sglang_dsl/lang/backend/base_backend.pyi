from sglang_dsl.backends.blocking import BaseBackend, SglSamplingParams

__all__ = ["BaseBackend", "SglSamplingParams"]
