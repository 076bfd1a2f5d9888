"""python -m runtime: `serve` starts the server, `router` balances load over several
servers. It reads the command and reports errors.

Exit codes: 0 it was stopped; 1 it could not start, or died; 2 the command line is wrong: an option, an
unknown model, a package that is not installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from runtime.protocol.console import FAILED, USAGE_ERROR, complain, run, version
from runtime.protocol.errors import BadRequest, NoSuchModel, RuntimeFault
from runtime.protocol.registry import MissingExtra, Registry, UnknownName

PROG = "python -m runtime"

COMMANDS: Registry[Callable[[Sequence[str], Mapping[str, str], str], int]] = Registry(
    "command",
    {
        "router": "runtime.server.router.command:command",
        "serve": "runtime.processes.supervise.supervisor:command",
    },
    extras={"router": "server", "serve": "server"},
)
"""name -> (its arguments, environment, how it was called) -> exit code"""

USAGE = f"""usage: {PROG} COMMAND [options]

  serve    serve a model over HTTP
  router   one address in front of several servers

  `{PROG} COMMAND --help` lists the options.

  --version
"""


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code."""
    if not arguments:
        print(USAGE, end="", file=sys.stderr)
        return USAGE_ERROR
    name, *rest = arguments
    if name in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0
    if name == "--version":
        print(f"sglang-dsl {version()}")
        return 0
    try:
        return COMMANDS.load(name)(rest, environment, f"{PROG} {name}")
    except (UnknownName, BadRequest, NoSuchModel, MissingExtra) as error:
        return complain(error, USAGE_ERROR)
    except RuntimeFault as error:
        return complain(error, FAILED)


if __name__ == "__main__":
    sys.exit(run(lambda: main(sys.argv[1:], os.environ)))
