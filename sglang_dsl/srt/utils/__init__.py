"""`srt.utils`: helpers of sglang's server package that its programs import. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.utils import load_image

__all__ = ["load_image"]
