"""Backends by name, and how other objects become one. Loads a backend's module only when it is asked for."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from typing import Any, Protocol, runtime_checkable

from runtime.protocol.registry import Registry
from sglang_dsl.backends.base import Backend

BACKENDS: Registry[type[Backend]] = Registry(
    "backend",
    {
        "mock": "sglang_dsl.backends.mock:MockBackend",
        "engine": "sglang_dsl.backends.engine:EngineBackend",
    },
)


@runtime_checkable
class EngineLike(Protocol):
    """The bundled engine in this process: it takes requests instead of calls."""

    async def submit(self, request: Any) -> Any: ...

    def stream(self, request: Any) -> AsyncIterator[Any]: ...

    def flush_cache(self) -> bool: ...


@functools.cache
def by_name(name: str) -> Backend:
    """The process's one backend of this name, with its defaults: an engine is started once, not per run."""
    return BACKENDS.load(name)()


def as_backend(value: Any) -> Backend:
    """A backend from what `backend=` takes: a Backend, an Engine, or a name of BACKENDS.

    Raises TypeError for anything else, UnknownName for a name nobody registered.
    """
    match value:
        case Backend():
            return value
        case str():
            return by_name(value)
        case EngineLike():
            # Found by name, so that whoever never runs an engine never loads its module.
            return BACKENDS.load("engine")(value)  # type: ignore[call-arg]
        case _:
            names = ", ".join(BACKENDS)
            raise TypeError(
                f"backend takes a Backend, an Engine or one of {names}; got {type(value).__name__}"
            )
