"""Whether the parts that options name are there. Told before a process is started or a model loaded."""

from __future__ import annotations

from typing import Any

from runtime.attention.table import ATTENTION, AUTO
from runtime.cache.eviction import EVICTION
from runtime.config.engine import EngineConfig
from runtime.config.options import near
from runtime.grammar.table import GRAMMAR_BACKENDS
from runtime.protocol.errors import BadRequest
from runtime.protocol.registry import Registry
from runtime.scheduler.policies import POLICIES

_PARTS: tuple[tuple[str, Registry[Any], tuple[str, ...]], ...] = (
    ("schedule_policy", POLICIES, ()),
    ("eviction_policy", EVICTION, ()),
    ("grammar_backend", GRAMMAR_BACKENDS, ()),
    ("attention", ATTENTION, (AUTO,)),
)


def check_names(config: EngineConfig) -> None:
    """Raises BadRequest for an option that names a part which nobody registered."""
    for option, table, more in _PARTS:
        name = getattr(config, option)
        if name not in table and name not in more:
            known = [*more, *table.names()]
            raise BadRequest(
                f"unknown {table.kind} {name!r}; known: {', '.join(known)}",
                where=option,
                hint=near(name, known) or None,
            )
