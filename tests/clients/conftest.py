"""Clients from their own packages ask the servers that the process tests ask."""

from tests.process.conftest import guarded_server, shared_server, start_server, wait_idle, wait_live

__all__ = ["guarded_server", "shared_server", "start_server", "wait_idle", "wait_live"]
