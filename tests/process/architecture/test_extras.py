"""What `make demo` installs is enough for it: all packages that the demo's modules import when they are
loaded come with the base dependencies or the extra `runtime`."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
OWN = ("sglang_dsl", "runtime")
STARTS = (
    "sglang_dsl.__main__", "sglang_dsl.console.demo", "sglang_dsl.backends.engine", "runtime.api",
    "runtime.engine.follower", "runtime.engine.runner", "runtime.models.families.dense",
    "runtime.attention.native_views",
)  # fmt: skip
"""Command, program, backend, engine, and the process of the model with what it loads by name."""


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((one for one in (path / "__init__.py", path.with_suffix(".py")) if one.is_file()), None)


def loaded(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Imports that run when a module is loaded: none inside functions, none for type checkers alone, none
    that may fail."""
    for node in body:
        match node:
            case ast.Import() | ast.ImportFrom():
                yield node
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield from loaded(node.orelse)
            case ast.If() | ast.With() | ast.ClassDef():
                yield from loaded([*node.body, *getattr(node, "orelse", ())])


def names_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [one.name for one in node.names]
    assert node.level == 0, "imports are absolute"
    return [str(node.module), *(f"{node.module}.{one.name}" for one in node.names)]


def imported() -> dict[str, str]:
    """Other packages -> a module that imports them, of all that loading STARTS loads."""
    found: dict[str, str] = {}
    waiting, seen = list(STARTS), set()
    while waiting:
        module = waiting.pop()
        file = file_of(module)
        if module in seen or file is None:
            continue
        seen.add(module)
        waiting += [module.rpartition(".")[0]] if "." in module else []
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for name in (name for node in loaded(tree.body) for name in names_of(node)):
            top = name.partition(".")[0]
            if top in OWN:
                waiting.append(name)
            elif top not in sys.stdlib_module_names:
                found.setdefault(top, module)
    return found


def provided(extras: tuple[str, ...]) -> set[str]:
    """Distributions, in lower case with "-", that these extras and the base name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for extra in extras for one in optional[extra])]
    return {normal(re.match(r"[\w.-]+", one)[0]) for one in wanted}  # type: ignore[index]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def missing(extras: tuple[str, ...]) -> dict[str, str]:
    packages, here = metadata.packages_distributions(), provided(extras)
    found = imported()
    return {
        name: module for name, module in found.items()
        if not here & {normal(one) for one in packages.get(name, [name])}
    }  # fmt: skip


def test_the_demo_has_all_that_it_imports() -> None:
    assert missing(("runtime",)) == {}


def test_without_the_extra_it_has_not() -> None:
    """The way of finding them finds some."""
    assert {"torch", "zmq", "numpy", "tokenizers", "safetensors"} <= set(missing(()))
