"""The layers: control plane and language import with torch absent; tables resolve."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LIGHT_PACKAGES = [
    "sglang_dsl",
    "runtime.protocol",
    "runtime.cache",
    "runtime.formats",
    "runtime.config",
    "runtime.ipc",
    "runtime.grammar",
    "runtime.scheduler",
    "runtime.tools",
    "runtime.disagg",
]
ON_RAY = {
    "sglang_dsl.execution.ray_batch",
    "sglang_dsl.execution.ray_worker",
    "runtime.server.replicas.command",
    "runtime.server.replicas.replica",
}
"""Loaded where Ray is connected; they hold no tables."""
OF_LIBRARIES = {
    f"sglang_dsl.integrations.{name}"
    for name in ("dspy", "langchain", "llama_index", "lm_eval", "outlines", "pytest_plugin")
}
"""Loaded where the library is installed; they hold no tables."""
LIGHT_MODULES = ["runtime", "runtime.plan", "runtime.pocket"]

BLOCKER = """
import importlib, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
for name in {names!r}:
    importlib.import_module(name)
print("ok", len({names!r}))
"""


def modules_below(package: str) -> list[str]:
    """Names of all modules of a package, found on disk (nothing is imported)."""
    folder = ROOT.joinpath(*package.split("."))
    found = [package]
    for info in pkgutil.walk_packages([str(folder)], prefix=f"{package}."):
        if info.name == "runtime.kernels.native.built":
            continue  # a library of C, no module
        found.append(info.name)
        if info.ispkg:
            found += modules_below(info.name)[1:]
    return sorted({name for name in found if not name.endswith("__main__")} - ON_RAY - OF_LIBRARIES)


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=300, cwd=ROOT
    )


def test_light_modules_import_without_torch() -> None:
    names = [name for package in LIGHT_PACKAGES for name in modules_below(package)] + LIGHT_MODULES
    assert len(names) > 40
    done = run(BLOCKER.format(blocked={"torch", "triton", "transformers"}, names=names))
    assert done.returncode == 0, done.stderr


def test_language_imports_on_the_base_install() -> None:
    """The base install has msgspec, rich and tqdm: nothing else may be needed to write and trace programs."""
    blocked = {
        "torch",
        "triton",
        "transformers",
        "numpy",
        "tokenizers",
        "safetensors",
        "jinja2",
        "outlines_core",
    }
    done = run(BLOCKER.format(blocked=blocked, names=modules_below("sglang_dsl")))
    assert done.returncode == 0, done.stderr


def test_importing_the_language_loads_nothing_heavy() -> None:
    heavy = ["torch", "numpy", "transformers", "rich", "tqdm", "jinja2", "tokenizers", "asyncio.subprocess"]
    done = run(f"import sglang_dsl, sys; print([m for m in {heavy[:-1]!r} if m in sys.modules])")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def all_registries() -> list[tuple[str, object]]:
    from runtime.protocol.registry import Registry

    found = []
    for package in ("runtime", "sglang_dsl"):
        for name in modules_below(package):
            if name.endswith("demo"):
                continue
            module = importlib.import_module(name)
            found += [
                (f"{name}.{attribute}", value)
                for attribute, value in vars(module).items()
                if isinstance(value, Registry) and not attribute.startswith("__")
            ]
    return found


def test_every_line_of_every_table_resolves() -> None:
    registries = all_registries()
    assert len({id(table) for _, table in registries}) >= 4
    for where, table in registries:
        for name in table.names():  # type: ignore[attr-defined]
            # None: the thing itself stands in the table.
            module, _, target = (table.target(name) or "").partition(":")  # type: ignore[attr-defined]
            if module in OF_LIBRARIES:
                assert target in defined(module), f"{where}: {name}"
            else:
                assert table.load(name) is not None, f"{where}: {name}"  # type: ignore[attr-defined]


def defined(module: str) -> set[str]:
    """Classes and functions of a module, which is not loaded."""
    body = ast.parse(ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text(encoding="utf-8")).body
    return {one.name for one in body if isinstance(one, ast.ClassDef | ast.FunctionDef)}


def test_public_names_exist() -> None:
    import runtime
    import sglang_dsl

    for module in (sglang_dsl, runtime):
        for name in module.__all__:
            assert getattr(module, name) is not None, name
        assert len(module.__all__) == len(set(module.__all__))


@pytest.mark.parametrize("folder", ["sglang_dsl", "runtime", "benchmarks", "examples"])
def test_every_file_says_what_it_is(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        text = path.read_text(encoding="utf-8").lstrip()
        if text and path.name != "__init__.py":
            assert text.startswith(('"""', "#!", 'r"""')), (
                f"{path.relative_to(ROOT)} opens without a docstring"
            )
