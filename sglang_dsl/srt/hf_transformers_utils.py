"""`srt.hf_transformers_utils`: a checkpoint's configuration and tokenizer, as sglang's programs load them.
Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.console.server_process import get_config, get_tokenizer

__all__ = ["get_config", "get_tokenizer"]
