"""`srt.utils`: helpers of sglang's server package that its programs import. Holds no code of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dsl.lang import modules_of
from sglang_dsl.utils import load_image

__all__ = ["load_image"]

if TYPE_CHECKING:
    from sglang_dsl.srt.utils import hf_transformers_utils as hf_transformers_utils
else:
    __getattr__ = modules_of(__name__)
