"""Refuses another module called `runtime` that is imported in place of this project's, unrun."""

from __future__ import annotations

import importlib.util
import os
import sys

_RUNTIME = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "runtime")
_SITES = ("site-packages", "dist-packages")


def refuse_another_runtime() -> None:
    """Raises ImportError if `import runtime` loads, or has loaded, another module."""
    try:
        spec = importlib.util.find_spec("runtime")
    except ValueError:  # loaded without a spec
        path = getattr(sys.modules["runtime"], "__file__", None) or "made in memory"
    else:
        if spec is None:
            return  # the import will fail
        folders = spec.submodule_search_locations or ()
        if any(
            folder == _RUNTIME or os.path.isfile(os.path.join(folder, "protocol", "registry.py"))
            for folder in folders
        ):
            return
        path = spec.origin or next(iter(folders), "made in memory")
    advice = "give it another name, or start Python where it is not on sys.path"
    if any(part in _SITES for part in path.split(os.sep)):
        advice = "uninstall the package it came with, or give sglang-dsl an environment without it"
    raise ImportError(
        "sglang_dsl needs its own package `runtime`, but another module of that name comes first: "
        f"{path}; {advice}",
        name="runtime",
        path=path,
    )


refuse_another_runtime()
