"""python -m sglang_dsl.launch_server: `python -m runtime serve` with sglang's flags. Holds no server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from runtime.protocol.registry import Registry
from sglang_dsl.console.server_options import own_flags

_SERVER: Registry[Callable[[Sequence[str], Mapping[str, str]], int]] = Registry(
    "server", {"serve": "runtime.__main__:main"}
)


def serve(flags: Sequence[str]) -> int:
    """`python -m runtime serve` in this process. The exit code."""
    return _SERVER.load("serve")(["serve", *flags], os.environ)


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    return serve(own_flags(arguments, lambda said: print(f"warning: {said}", file=sys.stderr)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
