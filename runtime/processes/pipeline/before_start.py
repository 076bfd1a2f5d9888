"""Around child processes: checks of options before they start, their environment, and how they ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.attention.table import ATTENTION, AUTO
from runtime.cache.radix import EVICTION
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


def describe_exit(code: int) -> str:
    """How a process with this returncode ended."""
    if code >= 0:
        return f"ended with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
