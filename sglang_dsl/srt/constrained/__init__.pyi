from sglang_dsl.ir.schema_regex import build_regex_from_object
from sglang_dsl.srt.constrained import outlines_backend as outlines_backend

__all__ = ["build_regex_from_object"]
