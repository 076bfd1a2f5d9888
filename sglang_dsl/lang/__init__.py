"""The language under the module names that programs written for sglang import from. Holds no code of its own:
each module names where a thing lives here. Modules are attributes without an import of their own:
`sgl.lang.chat_template`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dsl.lang import api as api
    from sglang_dsl.lang import backend as backend
    from sglang_dsl.lang import chat_template as chat_template
    from sglang_dsl.lang import choices as choices
    from sglang_dsl.lang import global_config as global_config
    from sglang_dsl.lang import interpreter as interpreter
    from sglang_dsl.lang import ir as ir
    from sglang_dsl.lang import tracer as tracer


def modules_of(package: str) -> Callable[[str], Any]:
    """The `__getattr__` of a package whose modules are loaded when they are used."""

    def find(name: str) -> Any:
        module = f"{package}.{name}"
        if name.startswith("_") or importlib.util.find_spec(module) is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return importlib.import_module(module)

    return find


if not TYPE_CHECKING:
    __getattr__ = modules_of(__name__)
