"""The fixtures of tests/unit/runtime/server."""

from tests.process.runtime.server.conftest import client, paced, pipeline, server, serving, wait_until

__all__ = ["client", "paced", "pipeline", "server", "serving", "wait_until"]
