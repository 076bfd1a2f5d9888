"""`srt.constrained`: the regex of a model, as sglang's programs import it. Holds no code of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dsl.ir.schema_regex import build_regex_from_object
from sglang_dsl.lang import modules_of

__all__ = ["build_regex_from_object"]

if TYPE_CHECKING:
    from sglang_dsl.srt.constrained import outlines_backend as outlines_backend
else:
    __getattr__ = modules_of(__name__)
