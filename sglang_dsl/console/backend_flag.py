"""--backend and --model: the flags that choose the backend of a command, or of a script of your own.

with chosen_backend(__doc__) as backend:
    state = program(backend=backend)
"""

from __future__ import annotations

import argparse
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from runtime.protocol.errors import BadRequest, NoSuchModel, RuntimeFault
from runtime.protocol.registry import MissingExtra
from sglang_dsl.backends import BACKENDS, NEED_A_MODEL
from sglang_dsl.backends.base import Backend
from sglang_dsl.errors import BackendError, BadProgram

KEY = "SGLANG_DSL_API_KEY"
"""The environment variable that holds a server's API key."""
POCKET = "pocket"


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The values of the two flags, checked. `backend` is a name of BACKENDS or a server's URL; `model` is
    pocket, a folder, or a model's name at the API. Raises BadProgram."""

    backend: str = "engine"
    model: str | None = None

    def __post_init__(self) -> None:
        needs_model = self.backend in NEED_A_MODEL
        if self.model is not None and not needs_model and self.backend != "engine":
            raise BadProgram(f"--model requires --backend engine, {', '.join(sorted(NEED_A_MODEL))}")
        if self.model is None and needs_model:
            raise BadProgram(f"--backend {self.backend} needs --model, the name of a model there")
        if not self.is_url and self.backend not in backend_names():
            raise BadProgram(
                f"--backend takes {', '.join(backend_names())} or a server's URL, got {self.backend!r}"
            )

    @property
    def is_url(self) -> bool:
        return self.backend.startswith(("http://", "https://"))

    @property
    def is_pocket(self) -> bool:
        return self.backend == "engine" and self.model in (None, POCKET)

    def __str__(self) -> str:
        if self.backend == "engine":
            return self.model or POCKET
        return self.backend if self.model is None else f"{self.model} ({self.backend})"

    @property
    def line(self) -> str:
        """The arguments of the command `:backend` that select it."""
        return self.backend if self.model is None else f"{self.backend} {self.model}"

    def source(self) -> tuple[str, str]:
        """The import statement and the expression that open it in a program."""
        if self.backend == "engine":
            return "from sglang_dsl import EngineBackend", f"EngineBackend({self.model or POCKET!r})"
        if self.is_url:
            return (
                "import os\n\nfrom sglang_dsl import RuntimeEndpoint",
                f"RuntimeEndpoint({self.backend!r}, os.environ.get({KEY!r}))",
            )
        module, _, name = str(BACKENDS.target(self.backend)).partition(":")
        return f"from {module} import {name}", f"{name}({'' if self.model is None else repr(self.model)})"

    def open(self) -> Backend:
        """A new backend, which the caller closes. Raises BadProgram, BackendError."""
        make: Any = BACKENDS.load("endpoint" if self.is_url else self.backend)
        args: tuple[str | None, ...] = () if self.model is None else (self.model,)
        if self.is_url:
            args = self.backend, os.environ.get(KEY) or None
        try:
            backend: Backend = make(*args)
        except (BadRequest, NoSuchModel) as fault:
            raise BadProgram(str(fault)) from fault
        except RuntimeFault as fault:
            raise BackendError(str(fault)) from fault
        return backend


def backend_names() -> list[str]:
    """The names that --backend takes; a server is given by its URL."""
    return [name for name in BACKENDS.names() if name != "endpoint"]


class Opening(Future[Backend]):
    """A backend that a thread opens in the background."""

    choice: BackendChoice

    def __init__(self, choice: BackendChoice) -> None:
        super().__init__()
        self.choice = choice
        threading.Thread(target=self._open, name="opening a backend", daemon=True).start()

    @classmethod
    def of(cls, choice: BackendChoice, backend: Backend) -> Opening:
        """An opening that has finished with this backend."""
        opening = cls.__new__(cls)
        Future.__init__(opening)
        opening.choice = choice
        opening.set_result(backend)
        return opening

    def _open(self) -> None:
        try:
            self.set_result(self.choice.open())
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Backend:
        while timeout is None and not self.done():
            wait([self], 0.1)  # in slices, so that Ctrl-C is noticed between them
        return super().result(timeout)


def add_backend_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        default="engine",
        metavar="NAME|URL",
        help="engine (the default), mock, the address of a running server (its API key is read from "
        f"{KEY}), or with --model an API: {', '.join(sorted(NEED_A_MODEL))}",
    )
    parser.add_argument("--model", default=None, help="a model: pocket, a folder, or its name at the API")


def opened(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Backend:
    """The backend that the flags choose; the caller closes it. Wrong flags exit with code 2."""
    try:
        return BackendChoice(args.backend, args.model).open()
    except (BadProgram, MissingExtra) as error:
        parser.error(str(error))


@contextmanager
def chosen_backend(about: str | None = None, argv: Sequence[str] | None = None) -> Iterator[Backend]:
    """The backend of a script that has only these two flags, closed at the end of the block."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_backend_flags(parser)
    backend = opened(parser, parser.parse_args(argv))
    try:
        yield backend
    finally:
        backend.close()
