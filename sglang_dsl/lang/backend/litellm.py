"""`lang.backend.litellm`: where sglang's programs import LiteLLM from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.litellm import LiteLLM
from sglang_dsl.lang.ir import SglSamplingParams

__all__ = ["LiteLLM", "SglSamplingParams"]
