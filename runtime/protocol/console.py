"""How a command tells what was wrong: one line, and an exit code. Knows no command."""

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
    """Print what was wrong, and give the exit code."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


def run(command: Callable[[], int]) -> int:
    """The exit code of `command`. Standard output that is closed before its end (`| head`) and Ctrl-C end it
    without a traceback; lines for standard error that cannot be written change nothing."""
    try:
        return _ran(command)
    finally:
        try:
            sys.stderr.flush()
        except (OSError, ValueError):
            _discard(sys.stderr)


def set_title(name: str) -> None:
    """What ps and top call this process, where setproctitle is installed."""
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
    """What is left in its buffer goes nowhere; else the interpreter would tell of it at its end, by an exit
    code of its own."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _closed() -> int:
    _discard(sys.stdout)
    return complain("standard output was closed before all was written", USAGE_ERROR)


def version() -> str:
    """Of this distribution; "unknown" where it is run without being installed."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"
