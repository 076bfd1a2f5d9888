from typing import Any

from sglang_dsl.api import (
    assistant,
    assistant_begin,
    assistant_end,
    flush_cache,
    gen,
    gen_int,
    gen_string,
    get_server_info,
    select,
    set_default_backend,
    system,
    system_begin,
    system_end,
    user,
    user_begin,
    user_end,
)
from sglang_dsl.function import function

__all__ = [
    "assistant", "assistant_begin", "assistant_end", "flush_cache", "function", "gen", "gen_int",
    "gen_string", "get_server_info", "select", "set_default_backend", "system", "system_begin",
    "system_end", "user", "user_begin", "user_end",
]  # fmt: skip

def __getattr__(name: str) -> Any: ...
