"""What one HTTP request is known by, and the line that is logged of it."""

from __future__ import annotations

import logging
import os
import re
from typing import Any
from urllib.parse import quote

from starlette.types import Scope

from runtime.processes.supervise.logs import ACCESS, FIELDS

HEADER = "x-request-id"
MAX_ID = 100
"""Characters of a client's id, at most: with its name it fits into an exemplar (OpenMetrics 1.0: 128)."""
_ID = re.compile(rf"[A-Za-z0-9._:/@+=~-]{{1,{MAX_ID}}}")

log = logging.getLogger(ACCESS)


def request_id(given: str | None) -> str:
    """The client's own where it is a plain word; else a fresh one."""
    return given if given is not None and _ID.fullmatch(given) else os.urandom(16).hex()


def say(scope: Scope, status: int | None, seconds: float, size: int) -> None:
    """One line, where these are wanted. status: None where the client went before there was an answer;
    size: bytes of the answer's body. Queries are left out: they may hold secrets."""
    if log.disabled or not log.isEnabledFor(logging.INFO):
        return
    client = scope.get("client")
    facts: dict[str, Any] = {
        "client": None if client is None else client[0],
        "method": scope["method"],
        "path": quote(scope["path"]),
        "status": status or 499,
        "duration_ms": round(seconds * 1000, 3),
        "bytes": size,
    }
    log.info("%(client)s %(method)s %(path)s %(status)d %(duration_ms).1f ms %(bytes)d bytes", facts,
             extra={FIELDS: facts})  # fmt: skip
