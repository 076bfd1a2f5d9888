"""`lang.api`: the words of the language, as sglang's programs import them. Holds no code of its own."""

from __future__ import annotations

from typing import Any

import sglang_dsl
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


def __getattr__(name: str) -> Any:
    # Engine, Runtime, image, ...: loaded when used, as in the package itself.
    return getattr(sglang_dsl, name)
