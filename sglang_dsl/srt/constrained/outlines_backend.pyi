from sglang_dsl.ir.schema_regex import build_regex_from_object

__all__ = ["build_regex_from_object"]
