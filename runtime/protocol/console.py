"""How commands report errors: one line, and an exit code. Knows no command."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from importlib import metadata
from typing import TextIO

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130
DISTRIBUTION = "sglang-dsl"


def complain(error: object, code: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def run(command: Callable[[], int]) -> int:
    """The exit code of `command`. A closed standard output or Ctrl-C end it without a traceback."""
    try:
        return _ran(command)
    finally:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            _discard(sys.stderr)


def set_title(name: str) -> None:
    """Set the name of this process in ps and top, if setproctitle is installed."""
    try:
        import setproctitle
    except ImportError:
        return
    setproctitle.setproctitle(f"sglang-dsl {name}")


def _ran(command: Callable[[], int]) -> int:
    try:
        code = command()
        sys.stdout.flush()
    except BrokenPipeError:
        return _closed()
    except SystemExit as end:
        # argparse prints its help before it ends; other libraries end by themselves when a pipe breaks.
        if isinstance(end.__context__, BrokenPipeError):
            return _closed()
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            return _closed()
        raise
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


def _discard(stream: TextIO) -> None:
    """Drop its buffer; else the interpreter would report it at its end, with another exit code."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _closed() -> int:
    _discard(sys.stdout)
    return complain("standard output was closed before all was written", USAGE_ERROR)


def version() -> str:
    """Of this distribution; "unknown" if it is not installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"
