"""`lang.backend.base_backend`: where sglang's programs import BaseBackend from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.blocking import BaseBackend
from sglang_dsl.lang.ir import SglSamplingParams

__all__ = ["BaseBackend", "SglSamplingParams"]
