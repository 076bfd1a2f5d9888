"""Constraints of a traced program, told to its backend before they are needed. Knows no executor.

Nothing waits for it, and nothing fails by it: what is wrong with a constraint is told where it is used.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from runtime.protocol.constraint import Constraint
from sglang_dsl.backends.base import Backend
from sglang_dsl.concurrency.loop import background
from sglang_dsl.errors import BadProgram, ProgramError
from sglang_dsl.interpreter.lower import lower
from sglang_dsl.ir import Gen, Node, Sampling

log = logging.getLogger(__name__)

AT_ONCE = 1024
"""Constraints in one message."""
PATIENCE_S = 120.0


def constraints_of(nodes: Iterable[Node], defaults: Sampling) -> tuple[Constraint, ...]:
    """What the generations among `nodes` must match, each once, in order."""
    found: dict[Constraint, None] = {}
    for node in nodes:
        if isinstance(node, Gen):
            try:
                constraint = lower(node, defaults).constraint
            except BadProgram:
                continue  # told where it runs
            if constraint is not None:
                found[constraint] = None
    return tuple(found)


def send(backend: Backend | None, constraints: tuple[Constraint, ...]) -> None:
    """Tell the backend of them, beside whatever goes on."""
    if backend is not None and constraints:
        told: Backend = backend
        background().start(lambda: _send(told, constraints))


async def _send(backend: Backend, constraints: tuple[Constraint, ...]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            for first in range(0, len(constraints), AT_ONCE):
                await backend.precompile(constraints[first : first + AT_ONCE])
    except (ProgramError, TimeoutError) as error:
        log.debug("%s did not compile ahead: %s", backend.name, error)
