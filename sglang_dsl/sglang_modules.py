"""The module names that programs written for sglang import from. Each is a stub in `lang`, `srt` or `test`:
type checkers read it, and a finder creates the module from it."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
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
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_TOP = frozenset({"global_config", "lang", "srt", "test"})
_WHOLE = f"{_PACKAGE}.lang.api"
"""The module that has every public name of the package besides its own."""


def stub_of(module: str) -> str:
    """The path of the stub that lists a module's names; "" if there is none."""
    package, *parts = module.split(".")
    if package != _PACKAGE or not parts or parts[0] not in _TOP:
        return ""
    path = os.path.join(_FOLDER, *parts)
    return next(filter(os.path.isfile, (f"{path}.pyi", os.path.join(path, "__init__.pyi"))), "")


def names_in(stub: str) -> dict[str, tuple[str, str]]:
    """The names that a stub imports, each with its module and its name there; without modules."""
    with open(stub, encoding="utf-8") as file:
        nodes = ast.parse(file.read()).body
    return {
        alias.asname or alias.name: (str(node.module), alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module != "typing"
        for alias in node.names
        if not stub_of(f"{node.module}.{alias.name}")
    }


class SglangModules(MetaPathFinder, InspectLoader):
    """Finds the modules that have stubs, and makes them. A name is loaded when it is first used."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not stub_of(fullname):
            return None
        return spec_from_loader(fullname, self, origin=__file__, is_package=self.is_package(fullname))

    def is_package(self, fullname: str) -> bool:
        return os.path.basename(stub_of(fullname)) == "__init__.pyi"

    def create_module(self, spec: ModuleSpec) -> None:
        """A plain module."""

    def get_source(self, fullname: str) -> str:
        return ""  # `python -m` does nothing, as with any module of names

    def get_code(self, fullname: str) -> CodeType:
        return compile("", __file__, "exec")

    def exec_module(self, module: ModuleType) -> None:
        names = names_in(stub_of(module.__name__))
        vars(module).update(
            __doc__=f"sglang's module {module.__name__.removeprefix(f'{_PACKAGE}.')!r}; see {__name__}.",
            __all__=sorted(names),
            __getattr__=partial(_attribute, module, names),
            __dir__=lambda: sorted({*vars(module), *names}),
        )


def _attribute(module: ModuleType, names: Mapping[str, tuple[str, str]], name: str) -> Any:
    """The object that the stub names, or the module of that name below `module`."""
    if name in names:
        source, attribute = names[name]
        value = getattr(importlib.import_module(source), attribute)
        setattr(module, name, value)
        return value
    if stub_of(f"{module.__name__}.{name}"):
        return importlib.import_module(f"{module.__name__}.{name}")
    if module.__name__ == _WHOLE:
        return getattr(importlib.import_module(_PACKAGE), name)
    raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")


# Before the finder of files, which takes a folder of stubs for a package without code.
sys.meta_path.insert(0, SglangModules())
