"""Clients from their own packages ask the server that the process tests ask."""

from tests.process.conftest import shared_server

__all__ = ["shared_server"]
