"""`lang.backend.runtime_endpoint`: the bundled runtime's backends, as sglang's programs import them. Holds no
code of its own."""

from __future__ import annotations

from sglang_dsl.backends.endpoint import RuntimeEndpoint
from sglang_dsl.console.server_process import Runtime
from sglang_dsl.lang.ir import SglSamplingParams

__all__ = ["Runtime", "RuntimeEndpoint", "SglSamplingParams"]
