"""`lang.backend.openai`: where sglang's programs import OpenAI from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.openai import OpenAI
from sglang_dsl.lang.ir import SglSamplingParams

__all__ = ["OpenAI", "SglSamplingParams"]
