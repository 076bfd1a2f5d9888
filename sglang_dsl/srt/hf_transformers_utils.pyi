from sglang_dsl.console.server_process import get_config, get_tokenizer

__all__ = ["get_config", "get_tokenizer"]
