"""`lang.backend.anthropic`: where sglang's programs import Anthropic from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.anthropic import Anthropic

__all__ = ["Anthropic"]
