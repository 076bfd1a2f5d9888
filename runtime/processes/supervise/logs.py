"""Logging of the server's processes: lines on stderr and, where asked for, in a file. Writing a line never
fails: a full disk or a closed terminal costs the line, not the process."""

from __future__ import annotations

import contextlib
import logging
import sys
from typing import TextIO

from runtime.config.serving.server import ServerConfig

QUIET = ("uvicorn.error", "httpx", "httpcore", "asyncio")
"""Loggers whose info lines say nothing to a user of the server."""


class _Lines(logging.StreamHandler[TextIO]):
    """Drops the lines that it cannot write."""

    def handleError(self, record: logging.LogRecord) -> None:
        return

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            super().flush()


class _Hide(logging.Filter):
    """Takes the key out of whatever is logged."""

    def __init__(self, secret: str) -> None:
        super().__init__()
        self._secret = secret

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if self._secret in message:
            record.msg, record.args = message.replace(self._secret, "***"), ()
        return True


def set_up(config: ServerConfig, name: str, *secrets: str) -> None:
    """Log as `name`, from now on and in all of this process. Replaces what was set up before. secrets: what
    is hidden besides the API key."""
    logging.raiseExceptions = False
    handlers: list[logging.Handler] = [_Lines(sys.stderr)]
    problem = None
    if config.log_file is not None:
        try:
            # Unbuffered enough: the handler flushes each line. Held open for the life of the process.
            handlers.append(_Lines(open(config.log_file, "a", encoding="utf-8")))  # noqa: SIM115
        except OSError as error:
            problem = f"the log file {config.log_file} cannot be opened: {error.strerror or error}"
    form = logging.Formatter(f"%(asctime)s %(levelname)-7s {name}: %(message)s")
    for handler in handlers:
        handler.setFormatter(form)
        for secret in (config.api_key, *secrets):
            if secret:
                handler.addFilter(_Hide(secret))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.setLevel(config.log_level.upper())
    for handler in handlers:
        root.addHandler(handler)
    if config.log_level != "debug":
        for quiet in QUIET:
            logging.getLogger(quiet).setLevel(logging.WARNING)
    if problem is not None:
        logging.getLogger(__name__).warning("%s; logging to stderr only", problem)
