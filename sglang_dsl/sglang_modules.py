"""The module names that programs written for sglang import from: one table, and a finder that creates each
module when it is imported. The modules hold names and no code; type checkers read the stubs in `lang`, `srt`
and `test`. `launch_server` and `utils` have code, and are ordinary files.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import InspectLoader, MetaPathFinder
else:  # importing importlib.abc takes a tenth of the time of importing the language

    class InspectLoader: ...

    class MetaPathFinder: ...


_PACKAGE = "sglang_dsl"


def _of(source: str, names: str = "", **renamed: str) -> dict[str, str]:
    """name -> "module:object" for the `names` of a module, and for objects that have another name there."""
    return {
        name: f"{source}:{target}"
        for name, target in (*((name, name) for name in names.split()), *renamed.items())
    }


_GLOBAL_CONFIG = _of("sglang_dsl.settings", "global_config")
_SAMPLING = _of("sglang_dsl.backends.blocking", "SglSamplingParams")
_CHECKPOINTS = _of("sglang_dsl.console.server_process", "get_config get_tokenizer")
_REGEX_OF_MODEL = _of("sglang_dsl.ir.schema_regex", "build_regex_from_object")

MODULES: dict[str, dict[str, str]] = {
    f"{_PACKAGE}.{name}": targets
    for name, targets in {
        "global_config": _GLOBAL_CONFIG,
        "lang": {},
        "lang.api": {
            **_of(
                "sglang_dsl.api",
                "assistant assistant_begin assistant_end flush_cache gen gen_int gen_string get_server_info"
                " select set_default_backend system system_begin system_end user user_begin user_end",
            ),
            **_of("sglang_dsl.function", "function"),
        },
        "lang.backend": {},
        "lang.backend.anthropic": _SAMPLING | _of("sglang_dsl.backends.anthropic", "Anthropic"),
        "lang.backend.base_backend": _SAMPLING | _of("sglang_dsl.backends.blocking", "BaseBackend"),
        "lang.backend.crusoe": _SAMPLING | _of("sglang_dsl.backends.openai", "Crusoe"),
        "lang.backend.litellm": _SAMPLING | _of("sglang_dsl.backends.litellm", "LiteLLM"),
        "lang.backend.openai": _SAMPLING | _of("sglang_dsl.backends.openai", "OpenAI"),
        "lang.backend.runtime_endpoint": {
            **_SAMPLING,
            **_of("sglang_dsl.backends.endpoint", "RuntimeEndpoint"),
            **_of("sglang_dsl.console.server_process", "Runtime"),
        },
        "lang.backend.vertexai": _SAMPLING | _of("sglang_dsl.backends.gemini", "VertexAI"),
        "lang.chat_template": _of(
            "runtime.formats.chat",
            "ChatTemplate ChatTemplateStyle get_chat_template get_chat_template_by_model_path"
            " register_chat_template register_chat_template_matching_function",
        ),
        "lang.choices": _of(
            "sglang_dsl.choices",
            "ChoicesDecision ChoicesSamplingMethod greedy_token_selection token_length_normalized"
            " unconditional_likelihood_normalized",
        ),
        "lang.global_config": _GLOBAL_CONFIG,
        "lang.interpreter": {
            **_of("sglang_dsl.interpreter.executor", StreamExecutor="Executor"),
            **_of("sglang_dsl.state.program_state", "ProgramState ProgramStateGroup"),
        },
        "lang.ir": {
            **_SAMPLING,
            **_of(
                "sglang_dsl.ir",
                SglConstantText="Text",
                SglExpr="Node",
                SglExprList="Seq",
                SglFork="Fork",
                SglGen="Gen",
                SglRoleBegin="RoleBegin",
                SglRoleEnd="RoleEnd",
                SglSelect="Select",
                SglVarScopeBegin="ScopeBegin",
                SglVarScopeEnd="ScopeEnd",
            ),
            **_of("sglang_dsl.function", "SglFunction"),
            **_of("sglang_dsl.patterns", "REGEX_BOOL REGEX_FLOAT REGEX_INT REGEX_STR"),
            **_of("sglang_dsl.utils", "SglSeparateReasoning"),
        },
        "lang.tracer": _of("sglang_dsl.compiler.trace", "Program Tracer"),
        "srt": {},
        "srt.constrained": _REGEX_OF_MODEL,
        "srt.constrained.outlines_backend": _REGEX_OF_MODEL,
        "srt.hf_transformers_utils": _CHECKPOINTS,
        "srt.utils": _of("sglang_dsl.utils", "load_image"),
        "srt.utils.hf_transformers_utils": _CHECKPOINTS,
        "test": {},
        "test.doc_patch": _of("sglang_dsl.utils", "launch_server_cmd"),
        "test.test_utils": _of(
            "sglang_dsl.utils",
            "add_common_other_args_and_parse add_common_sglang_args_and_parse dump_bench_raw_result is_in_ci"
            " select_sglang_backend",
        ),
    }.items()
}
"""Module -> its names, each with where the object is."""

_WHOLE = f"{_PACKAGE}.lang.api"
"""The module that has every public name of the package besides its own."""


class SglangModules(MetaPathFinder, InspectLoader):
    """Finds the modules of MODULES, and makes them. A name is loaded when it is first used."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in MODULES:
            return None
        return spec_from_loader(fullname, self, origin=__file__, is_package=self.is_package(fullname))

    def is_package(self, fullname: str) -> bool:
        return any(name.startswith(f"{fullname}.") for name in MODULES)

    def create_module(self, spec: ModuleSpec) -> None:
        """A plain module."""

    def get_source(self, fullname: str) -> str:
        return ""  # `python -m` does nothing, as with any module of names

    def get_code(self, fullname: str) -> CodeType:
        return compile("", __file__, "exec")

    def exec_module(self, module: ModuleType) -> None:
        names = sorted(MODULES[module.__name__])
        vars(module).update(
            __doc__=f"sglang's module {module.__name__.removeprefix(f'{_PACKAGE}.')!r}; see {__name__}.",
            __all__=names,
            __getattr__=partial(_attribute, module),
            __dir__=lambda: sorted({*vars(module), *names}),
        )


def _attribute(module: ModuleType, name: str) -> Any:
    """The object that MODULES names, or the module of that name below `module`."""
    if target := MODULES[module.__name__].get(name):
        source, _, attribute = target.partition(":")
        value = getattr(importlib.import_module(source), attribute)
        setattr(module, name, value)
        return value
    if f"{module.__name__}.{name}" in MODULES:
        return importlib.import_module(f"{module.__name__}.{name}")
    if module.__name__ == _WHOLE:
        return getattr(importlib.import_module(_PACKAGE), name)
    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")


# Before the finder of files, which takes a folder of stubs for a package without code.
sys.meta_path.insert(0, SglangModules())
