"""`lang.backend.litellm`: where sglang's programs import LiteLLM from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.litellm import LiteLLM

__all__ = ["LiteLLM"]
