from sglang_dsl.backends.blocking import SglSamplingParams
from sglang_dsl.backends.endpoint import RuntimeEndpoint
from sglang_dsl.console.server_process import Runtime

__all__ = ["Runtime", "RuntimeEndpoint", "SglSamplingParams"]
