"""Long tests ask the engines and servers that process tests ask, each started once."""

from tests.process.conftest import (
    backend,
    engine,
    guarded_server,
    loads_when_told,
    plain_engine,
    shared_server,
    start_server,
    wait_idle,
    wait_live,
)

__all__ = [
    "backend",
    "engine",
    "guarded_server",
    "loads_when_told",
    "plain_engine",
    "shared_server",
    "start_server",
    "wait_idle",
    "wait_live",
]
