"""sglang_dsl: a language for programs that talk to language models.

    from sglang_dsl import Engine, assistant, function, gen, set_default_backend, user

    @function
    def qa(s, question):
        s += user(question)
        s += assistant(gen("answer", max_tokens=32))

    set_default_backend(Engine("pocket"))
    print(qa(question="What is the capital of France?")["answer"])

Only the public names; the backends, and all that needs more than the standard library, are loaded when used.
"""

from __future__ import annotations

import importlib
from typing import Any

from sglang_dsl.api import (
    FACTORIES,
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
from sglang_dsl.choices import (
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sglang_dsl.errors import (
    BackendError,
    BadProgram,
    MissingVariable,
    NoBackend,
    ProgramCancelled,
    ProgramError,
    SglError,
    StateClosed,
    Timeout,
    Unsupported,
)
from sglang_dsl.function import SglFunction, function
from sglang_dsl.patterns import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR
from sglang_dsl.settings import global_config
from sglang_dsl.state import ProgramState, ProgramStateGroup
from sglang_dsl.trace import Program

__version__ = "0.1.0.dev0"

# Names that cost something, or live in the runtime: resolved when they are first asked for.
_LATE = {"MockBackend": ("sglang_dsl.backends.mock", "MockBackend")}
_LATE |= {"EngineBackend": ("sglang_dsl.backends.engine", "EngineBackend")}

__all__ = [
    "BackendError",
    "BadProgram",
    "Engine",
    "EngineBackend",
    "MissingVariable",
    "MockBackend",
    "NoBackend",
    "Program",
    "ProgramCancelled",
    "ProgramError",
    "ProgramState",
    "ProgramStateGroup",
    "REGEX_BOOL",
    "REGEX_FLOAT",
    "REGEX_INT",
    "REGEX_STR",
    "SglError",
    "SglFunction",
    "StateClosed",
    "Timeout",
    "Unsupported",
    "assistant",
    "assistant_begin",
    "assistant_end",
    "flush_cache",
    "function",
    "gen",
    "gen_int",
    "gen_string",
    "get_server_info",
    "global_config",
    "greedy_token_selection",
    "select",
    "set_default_backend",
    "system",
    "system_begin",
    "system_end",
    "token_length_normalized",
    "unconditional_likelihood_normalized",
    "user",
    "user_begin",
    "user_end",
]


def __getattr__(name: str) -> Any:
    if name in _LATE:
        module, attribute = _LATE[name]
        return getattr(importlib.import_module(module), attribute)
    if name in FACTORIES:
        return FACTORIES.load(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
