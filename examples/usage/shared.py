"""Which backend the programs of this folder run on: the bundled engine in this process, or what the command
line names.

    python examples/usage/chat.py
    python examples/usage/chat.py http://127.0.0.1:30000
    python examples/usage/chat.py --backend anthropic --model claude-haiku-4-5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from sglang_dsl.backends.base import Backend
from sglang_dsl.console.backend_flag import add_backend_flags, opened


def backend(argv: Sequence[str] | None = None) -> Backend:
    parser = argparse.ArgumentParser()
    parser.add_argument("place", nargs="?", metavar="NAME|URL", help="the same as --backend")
    add_backend_flags(parser)
    args = parser.parse_args(sys.argv[1:] if argv is None else argv)
    args.backend = args.place or args.backend
    return opened(parser, args)
