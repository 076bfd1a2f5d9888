"""`lang.backend.vertexai`: where sglang's programs import VertexAI from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.gemini import VertexAI
from sglang_dsl.lang.ir import SglSamplingParams

__all__ = ["VertexAI", "SglSamplingParams"]
