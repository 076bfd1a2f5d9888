"""Logging of the server's processes: lines on stderr and, where asked for, in a file. Writing a line never
fails: a full disk or a closed terminal costs the line, not the process."""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import sys
from contextvars import ContextVar
from typing import Any, TextIO

from runtime.config.serving.server import ServerConfig

QUIET = ("uvicorn.error", "httpx", "httpcore", "asyncio")
"""Loggers whose info lines do not matter to users of the server."""


ACCESS = "runtime.access"
"""Logger of one line for each HTTP request."""
REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
TRACE_ID: ContextVar[str | None] = ContextVar("trace_id", default=None)
"""Of the current HTTP request, if it is traced: 32 hexadecimal digits."""
FIELDS = "fields"
"""Attribute of a record: more fields of a line of JSON, as a dict."""


class _Text(logging.Formatter):
    """Lines that end with the id of their request."""

    def __init__(self, name: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {name}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line, identity = super().formatMessage(record), REQUEST_ID.get()
        return line if identity is None else f"{line} [{identity}]"


class _Json(logging.Formatter):
    """One JSON object in each line, with the time in UTC."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(),
            "level": record.levelname.lower(),
            "process": self._name,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, variable in (("request_id", REQUEST_ID), ("trace_id", TRACE_ID)):
            if (value := variable.get()) is not None:
                fields[key] = value
        fields |= getattr(record, FIELDS, {})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class _Lines(logging.StreamHandler[TextIO]):
    """Drops the lines that it cannot write."""

    def handleError(self, record: logging.LogRecord) -> None:
        return

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().flush()


class _Hide(logging.Filter):
    """Removes a key from all messages."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if self._secret in message:
            record.msg, record.args = message.replace(self._secret, "***"), ()
        return True


def set_up(config: ServerConfig, name: str, *secrets: str) -> None:
    """Log as `name` in this process. Replaces earlier handlers. secrets: are hidden like the API keys."""
    logging.raiseExceptions = False
    handlers: list[logging.Handler] = [_Lines(sys.stderr)]
    problem = None
    if config.log_file is not None:
        try:
            # Unbuffered enough: the handler flushes each line. Held open for the life of the process.
            handlers.append(_Lines(open(config.log_file, "a", encoding="utf-8")))  # noqa: SIM115
        except OSError as error:
            problem = f"the log file {config.log_file} cannot be opened: {error.strerror or error}"
    form = _Json(name) if config.log_format == "json" else _Text(name)
    for handler in handlers:
        handler.setFormatter(form)
        for secret in (config.api_key, config.admin_api_key, *secrets):
            if secret:
                handler.addFilter(_Hide(secret))
    logging.basicConfig(level=config.log_level.upper(), handlers=handlers, force=True)
    logging.getLogger(ACCESS).disabled = not config.access_log
    if config.log_level != "debug":
        for quiet in QUIET:
            logging.getLogger(quiet).setLevel(logging.WARNING)
    if problem is not None:
        logging.getLogger(__name__).warning("%s; logging to stderr only", problem)
