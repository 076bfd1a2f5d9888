"""The runtime behind sglang-dsl: schedules, caches, constrains and runs models.

Importing it loads nothing heavy; its public names are resolved when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.api import Engine as Engine

_NAMES = {
    "Engine": "runtime.api",
    "BUNDLED": "runtime.config.checkpoints",
    "MCPToolServer": "runtime.tools",
    "ServerArgs": "runtime.config.server_args",
    "values_of": "runtime.grammar.json_schema.examples",
}
"""Name -> its module. The language reaches other parts than protocol, formats and viewer by these names
only."""
__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    module = _NAMES.get(name)
    if module is None:
        raise AttributeError(f"module 'runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_NAMES])
