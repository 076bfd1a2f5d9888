"""Before a process is started or a model loaded: checks the names in options, and filters the environment of
child processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.attention.table import ATTENTION, AUTO
from runtime.cache.eviction import EVICTION
from runtime.config.engine import EngineConfig
from runtime.grammar.table import GRAMMAR_BACKENDS
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import Registry, near
from runtime.scheduler.policies import POLICIES

KEYS = frozenset({"SGLANG_DSL_API_KEY", "SGLANG_DSL_ADMIN_API_KEY"})
_PARTS: tuple[tuple[str, Registry[Any], tuple[str, ...]], ...] = (
    ("schedule_policy", POLICIES, ()),
    ("eviction_policy", EVICTION, ()),
    ("grammar_backend", GRAMMAR_BACKENDS, ()),
    ("attention", ATTENTION, (AUTO,)),
)


def check_names(config: EngineConfig) -> None:
    """Raises BadRequest for an option with a name that is not registered."""
    for option, table, more in _PARTS:
        name = getattr(config, option)
        if name not in table and name not in more:
            known = [*more, *table.names()]
            meant = near(name, known)
            raise BadRequest(
                f"unknown {table.kind} {name!r}; known: {', '.join(known)}",
                where=option,
                hint=f"did you mean {meant!r}?" if meant else None,
            )


def for_children(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without API keys, and with this package's folder on PYTHONPATH."""
    inherited = {name: value for name, value in environment.items() if name not in KEYS}
    root = Path(__file__).resolve().parents[3]
    if root.name not in ("site-packages", "dist-packages"):
        parts = (environment.get("PYTHONPATH"), str(root))
        inherited["PYTHONPATH"] = os.pathsep.join(part for part in parts if part)
    return inherited
