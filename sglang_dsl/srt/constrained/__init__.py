"""`srt.constrained`: the regex of a model, as sglang's programs import it. Holds no code of its own."""

from __future__ import annotations

from sglang_dsl.ir.schema_regex import build_regex_from_object

__all__ = ["build_regex_from_object"]
