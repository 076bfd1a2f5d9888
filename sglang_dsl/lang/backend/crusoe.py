"""`lang.backend.crusoe`: where sglang's programs import Crusoe from. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.backends.crusoe import Crusoe
from sglang_dsl.lang.ir import SglSamplingParams

__all__ = ["Crusoe", "SglSamplingParams"]
