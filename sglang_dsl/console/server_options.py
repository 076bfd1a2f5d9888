"""A server's options by sglang's names, as options of the bundled runtime, and the command that starts it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.formats.reasoning.marks import AUTO, REASONING_TYPES
from runtime.protocol import server_names
from runtime.protocol.errors import NotSupported
from sglang_dsl.errors import Unsupported, warn

PARSER = "reasoning_parser"


def runtime_options(options: Mapping[str, Any], model: Any = None, **how: Any) -> dict[str, Any]:
    """`options` by the runtime's names; unknown names stay. `model`: the checkpoint they are for. Warns about
    options without effect. Raises Unsupported for what the runtime cannot do."""
    translated = {name: value for name, value in options.items() if name != PARSER}
    parser = options.get(PARSER)
    if parser is not None:  # an unknown parser is one more option without effect
        known = parser in (AUTO, *REASONING_TYPES)
        translated[PARSER if known else "default_reasoning_parser"] = parser
    try:
        return server_names.runtime_options(translated, model, **{"tell": warn, **how})
    except NotSupported as error:
        raise Unsupported(error.message, hint=error.hint) from error


def server_command(*arguments: str) -> tuple[list[str], dict[str, str]]:
    """`python -m runtime serve ARGUMENTS`, and its environment. This distribution's `runtime` is run even if
    the working directory has a module of that name, which `-m` alone would prefer."""
    environment, root = dict(os.environ), Path(__file__).resolve().parents[2]
    if root.name not in ("site-packages", "dist-packages"):
        paths = (environment.get("PYTHONPATH"), str(root))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return [sys.executable, "-P", "-m", "runtime", "serve", *arguments], environment


def end_process(process: subprocess.Popen[bytes], timeout: float) -> None:
    """SIGTERM, and after `timeout` seconds SIGKILL to all that it started."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout)
