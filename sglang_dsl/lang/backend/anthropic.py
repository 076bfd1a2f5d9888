"""`lang.backend.anthropic`: where sglang's programs import Anthropic from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.anthropic import Anthropic
from sglang_dsl.lang.ir import SglSamplingParams

__all__ = ["Anthropic", "SglSamplingParams"]
