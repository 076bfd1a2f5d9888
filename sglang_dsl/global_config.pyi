from sglang_dsl.settings import global_config

__all__ = ["global_config"]
