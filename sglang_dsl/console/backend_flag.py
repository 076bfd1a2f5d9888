"""--backend and --model: the flags by which a command, or a script of your own, says what it runs on.

with chosen_backend(__doc__) as backend:
    state = program(backend=backend)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from runtime.protocol.registry import MissingExtra
from sglang_dsl.backends import NEED_A_MODEL
from sglang_dsl.backends.base import Backend
from sglang_dsl.console.session.opening import KEY, Place
from sglang_dsl.errors import BadProgram


def add_backend_flags(parser: argparse.ArgumentParser) -> None:
    """Add --backend and --model."""
    parser.add_argument(
        "--backend",
        default="engine",
        metavar="NAME|URL",
        help="engine (the default), mock, the address of a running server (its API key is read from "
        f"{KEY}), or with --model an API: {', '.join(sorted(NEED_A_MODEL))}",
    )
    parser.add_argument("--model", default=None, help="a model: pocket, a folder, or its name at the API")


def opened(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Backend:
    """The backend that the flags name; the caller closes it. What is wrong with them ends the program with
    one line and code 2, as any wrong flag does."""
    try:
        return Place(args.backend, args.model).open()
    except (BadProgram, MissingExtra) as error:
        parser.error(str(error))


@contextmanager
def chosen_backend(about: str | None = None, argv: Sequence[str] | None = None) -> Iterator[Backend]:
    """The backend of a script that has no other flags, closed at the end of the block. argv: instead of the
    command line."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_backend_flags(parser)
    backend = opened(parser, parser.parse_args(argv))
    try:
        yield backend
    finally:
        backend.close()
