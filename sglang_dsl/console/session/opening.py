"""Which backend a command, a prompt or a notebook runs on, by name; and opening one beside whoever waits for
it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from runtime.protocol.errors import BadRequest, NoSuchModel, RuntimeFault
from sglang_dsl.backends import BACKENDS, NEED_A_MODEL
from sglang_dsl.backends.base import Backend
from sglang_dsl.concurrency.loop import background
from sglang_dsl.errors import BackendError, BadProgram

KEY = "SGLANG_DSL_API_KEY"
"""The environment variable that holds a server's API key."""
POCKET = "pocket"


@dataclass(frozen=True, slots=True)
class Place:
    """A backend, not opened. backend: a name of BACKENDS or a server's URL; model: pocket, a folder, or its
    name at the API. Raises BadProgram."""

    backend: str = "engine"
    model: str | None = None

    def __post_init__(self) -> None:
        takes_model = self.backend == "engine" or self.backend in NEED_A_MODEL
        if self.model is not None and not takes_model:
            raise BadProgram(f"--model requires --backend engine, {', '.join(sorted(NEED_A_MODEL))}")
        if self.model is None and self.backend in NEED_A_MODEL:
            raise BadProgram(f"--backend {self.backend} needs --model, the name of a model there")
        if not self.is_url and (self.backend not in BACKENDS.names() or self.backend == "endpoint"):
            named = ", ".join(name for name in BACKENDS.names() if name != "endpoint")
            raise BadProgram(f"--backend takes {named} or a server's URL, got {self.backend!r}")

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
        """What `:backend` is given to come back here."""
        return " ".join(word for word in (self.backend, self.model) if word is not None)

    def source(self) -> tuple[str, str]:
        """What a program imports for it, and the expression that opens it."""
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
        """A backend of the caller's own, to be closed at the end. Raises BadProgram, BackendError."""
        if self.is_url:
            at: Any = BACKENDS.load("endpoint")
            served: Backend = at(self.backend, os.environ.get(KEY) or None)
            return served
        make: Any = BACKENDS.load(self.backend)
        try:
            made: Backend = make() if self.model is None else make(self.model)
        except RuntimeFault as fault:
            if isinstance(fault, BadRequest | NoSuchModel):
                raise BadProgram(str(fault)) from fault
            raise BackendError(str(fault)) from fault
        return made


def close(backend: Backend) -> None:
    """Close a backend; waits."""
    background().run(backend.aclose())


class Opening:
    """A backend that is opened on a thread of its own, at once."""

    def __init__(self, place: Place, then: Callable[[], None] = lambda: None) -> None:
        self.place = place
        self._then = then
        self._found: Backend | None = None
        self.error: BaseException | None = None
        self._done = threading.Event()
        threading.Thread(target=self._open, name="opening a backend", daemon=True).start()

    @classmethod
    def of(cls, place: Place, backend: Backend) -> Opening:
        """One that is open already."""
        made = cls.__new__(cls)
        made.place, made._found, made.error, made._done = place, backend, None, threading.Event()
        made._done.set()
        return made

    def _open(self) -> None:
        try:
            self._found = self.place.open()
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self.error = error
        self._done.set()
        self._then()

    @property
    def done(self) -> bool:
        """Whether it is open, or has failed."""
        return self._done.is_set()

    def wait(self, seconds: float) -> bool:
        """Until it is, for at most `seconds`; whether it is."""
        return self._done.wait(seconds)

    def result(self) -> Backend:
        """The backend; waits. Raises what opening it raised."""
        while not self._done.wait(0.1):  # in slices: Ctrl-C is heard in between
            pass
        if self.error is not None:
            raise self.error
        assert self._found is not None
        return self._found
