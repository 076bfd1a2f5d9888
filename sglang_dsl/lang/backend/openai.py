"""`lang.backend.openai`: where sglang's programs import OpenAI from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.openai import OpenAI

__all__ = ["OpenAI"]
