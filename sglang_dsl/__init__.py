"""sglang_dsl: a language for programs that call language models.

    from sglang_dsl import Engine, assistant, function, gen, set_default_backend, user

    @function
    def qa(s, question):
        s += user(question)
        s += assistant(gen("answer", max_tokens=32))

    set_default_backend(Engine("pocket"))
    print(qa(question="What is the capital of France?")["answer"])

This module holds only the public names. Backends, and everything that needs more than the standard library,
are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sglang_dsl import sglang_modules as sglang_modules  # finds lang, srt, test and global_config
from sglang_dsl import shadowing as shadowing  # before anything of the runtime: another one is told here

# isort: split
from runtime.protocol.registry import Registry
from sglang_dsl.api import (
    assistant,
    assistant_begin,
    assistant_end,
    audio,
    developer,
    flush_cache,
    gen,
    gen_int,
    gen_string,
    get_server_info,
    image,
    role,
    role_begin,
    role_end,
    select,
    separate_reasoning,
    set_default_backend,
    system,
    system_begin,
    system_end,
    tool,
    tools,
    user,
    user_begin,
    user_end,
    video,
)
from sglang_dsl.budgets import Budget, price_per_million
from sglang_dsl.choices import (
    Choice,
    exact_string_likelihood,
    greedy_token_selection,
    token_length_normalized,
    unconditional_likelihood_normalized,
)
from sglang_dsl.errors import (
    BackendError,
    BadProgram,
    BudgetExceeded,
    InvalidValue,
    MissingVariable,
    NoBackend,
    NoWinner,
    ProgramCancelled,
    ProgramError,
    ReplayMiss,
    SglError,
    StateClosed,
    Timeout,
    ToolError,
    ToolLoopLimit,
    Unsupported,
)
from sglang_dsl.function import SglFunction, function
from sglang_dsl.global_config import global_config
from sglang_dsl.patterns import REGEX_BOOL, REGEX_FLOAT, REGEX_INT, REGEX_STR

if TYPE_CHECKING:
    from sglang_dsl import backends as backends
    from sglang_dsl import errors as errors
    from sglang_dsl import hooks as hooks
    from sglang_dsl import integrations as integrations
    from sglang_dsl import ir as ir
    from sglang_dsl import lang as lang
    from sglang_dsl import srt as srt
    from sglang_dsl import telemetry as telemetry
    from sglang_dsl import test as test
    from sglang_dsl import utils as utils
    from sglang_dsl.backends.anthropic import Anthropic
    from sglang_dsl.backends.endpoint import RuntimeEndpoint
    from sglang_dsl.backends.engine import EngineBackend
    from sglang_dsl.backends.gemini import Gemini, VertexAI
    from sglang_dsl.backends.litellm import LiteLLM
    from sglang_dsl.backends.mock import MockBackend
    from sglang_dsl.backends.openai import Crusoe, OpenAI
    from sglang_dsl.compiler.trace import Program
    from sglang_dsl.console.server_process import Runtime
    from sglang_dsl.interpreter.core import Checkpoint
    from sglang_dsl.state.async_state import AsyncProgramState
    from sglang_dsl.state.program_state import ProgramState, ProgramStateGroup
    from sglang_dsl.tool_use.definitions import Tool
    from sglang_dsl.views.run_file import write_run
    from sglang_dsl.views.snapshot import Snapshot

__version__ = "0.1.0.dev0"

# Names that bring much with them, or live in the runtime: found when they are first asked for.
_LATE: Registry[Any] = Registry(
    "public name",
    {
        "Anthropic": "sglang_dsl.backends.anthropic:Anthropic",
        "Crusoe": "sglang_dsl.backends.openai:Crusoe",
        "Engine": "runtime.api:Engine",
        "EngineBackend": "sglang_dsl.backends.engine:EngineBackend",
        "Gemini": "sglang_dsl.backends.gemini:Gemini",
        "LiteLLM": "sglang_dsl.backends.litellm:LiteLLM",
        "MockBackend": "sglang_dsl.backends.mock:MockBackend",
        "OpenAI": "sglang_dsl.backends.openai:OpenAI",
        "AsyncProgramState": "sglang_dsl.state.async_state:AsyncProgramState",
        "Checkpoint": "sglang_dsl.interpreter.core:Checkpoint",
        "Program": "sglang_dsl.compiler.trace:Program",
        "ProgramState": "sglang_dsl.state.program_state:ProgramState",
        "ProgramStateGroup": "sglang_dsl.state.program_state:ProgramStateGroup",
        "Runtime": "sglang_dsl.console.server_process:Runtime",
        "RayData": "sglang_dsl.execution.engines:RayData",
        "RuntimeEndpoint": "sglang_dsl.backends.endpoint:RuntimeEndpoint",
        "Snapshot": "sglang_dsl.views.snapshot:Snapshot",
        "ServerArgs": "runtime:ServerArgs",
        "Tool": "sglang_dsl.tool_use.definitions:Tool",
        "VertexAI": "sglang_dsl.backends.gemini:VertexAI",
        "write_run": "sglang_dsl.views.run_file:write_run",
    },
    extras={"Engine": "runtime", "ServerArgs": "server"},
)

__all__ = [
    "Anthropic", "AsyncProgramState", "BackendError", "BadProgram", "Budget", "BudgetExceeded", "Checkpoint",
    "Choice", "Crusoe", "Engine", "EngineBackend", "Gemini", "LiteLLM", "InvalidValue", "MissingVariable",
    "MockBackend", "NoBackend", "NoWinner", "OpenAI", "Program", "ProgramCancelled", "ProgramError",
    "ProgramState", "ProgramStateGroup", "REGEX_BOOL", "REGEX_FLOAT", "REGEX_INT", "REGEX_STR", "ReplayMiss",
    "RayData", "Runtime", "RuntimeEndpoint", "ServerArgs", "SglError", "SglFunction", "Snapshot",
    "StateClosed", "Timeout", "Tool", "ToolError", "ToolLoopLimit", "Unsupported", "VertexAI", "assistant",
    "assistant_begin", "assistant_end", "audio", "developer", "exact_string_likelihood", "flush_cache",
    "function", "gen", "gen_int", "gen_string", "get_server_info", "global_config", "greedy_token_selection",
    "image", "price_per_million", "role", "role_begin", "role_end", "select", "separate_reasoning",
    "set_default_backend", "system", "system_begin", "system_end", "token_length_normalized", "tool", "tools",
    "unconditional_likelihood_normalized", "user", "user_begin", "user_end", "video", "write_run",
    "__version__",
]  # fmt: skip


_MODULES = frozenset(
    {"backends", "errors", "hooks", "integrations", "ir", "lang", "srt", "telemetry", "test", "utils"}
)
"""Used as sgl.utils and the like, without an import of their own."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _LATE.load(name)
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """%load_ext sglang_dsl: adds the magics %sgl and %%sgl."""
    importlib.import_module(f"{__name__}.console.front.ipython").load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """%unload_ext sglang_dsl: removes the magics and ends their session."""
    importlib.import_module(f"{__name__}.console.front.ipython").unload(shell)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
