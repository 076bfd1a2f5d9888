"""IPython and its notebooks: after `%load_ext sglang_dsl`

    %%sgl               a cell of a session: `s` persists, and text is shown while it is generated
    %sgl COMMAND        a command: %sgl backend mock, %sgl undo, %sgl save talk.json; alone: the list

A command that ends with "?", which IPython takes for its own syntax, is written in a cell: %%sgl and then
`:fork 2 And why?`. `s` and the language's names are ordinary names of the notebook once a session has begun.
"""

from __future__ import annotations

import atexit
import time
from typing import Any

import msgspec
from rich.console import Console

from runtime.protocol.registry import MissingExtra
from sglang_dsl.console.backend_flag import BackendChoice, Opening
from sglang_dsl.console.front.screen import Screen
from sglang_dsl.console.session import cell as cells
from sglang_dsl.console.session import commands
from sglang_dsl.console.session.follow import View
from sglang_dsl.console.session.session import Outcome, Session
from sglang_dsl.errors import BadProgram, SglError
from sglang_dsl.views import html
from sglang_dsl.views.notebook import BETWEEN_S
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot
from sglang_dsl.views.terminal import printable

MAGIC = "sgl"


class CellOutput(View):
    """Shows a session's cell as one output of the notebook's cell, which is replaced while there is more."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._displayed_at = 0.0
        self._seen: Snapshot | None = None
        self._first_call: int | None = None

    def update(self, seen: Snapshot, changed: list[ForkSnapshot]) -> None:
        if self._first_call is None:
            self._first_call = len(seen.calls)
        forks = tuple(ForkSnapshot(fork.branches, True, fork.at if fork.joined else None) for fork in changed)
        calls = seen.calls[self._first_call :]
        self._seen = msgspec.structs.replace(seen, forks=forks, calls=calls, error=None)
        if time.monotonic() - self._displayed_at >= BETWEEN_S:
            self._display()

    def end(self) -> None:
        self._display()

    def _display(self) -> None:
        from IPython import display

        seen = self._seen
        if seen is None or (seen.transcript is seen.since and not seen.partial and not seen.forks):
            return
        self._displayed_at = time.monotonic()
        text = printable(seen.transcript.text(seen.since) + seen.partial)
        data = {"text/plain": text, "text/html": html.page(seen)}
        if self._handle is None:
            first: Any = display.display
            self._handle = first(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class Magic:
    """%sgl and %%sgl of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._session: Session | None = None

    def __call__(self, line: str, cell: str | None = None) -> Any:
        """Raises the error of the cell, with a short traceback."""
        line = line.strip()
        try:
            if cell is None:
                return self._command(line.removeprefix(":"))
            if cell.lstrip().startswith(":") and not line:
                return self._command(cell.strip().removeprefix(":"))
            if line:
                raise BadProgram(f"%%{MAGIC} takes no arguments on its line; %{MAGIC} {line} is a command")
            session = self._begun()
            return self._value_of(session.run(cell, self._view()))
        except (SglError, MissingExtra) as error:
            raise _short(error) from None

    def _command(self, line: str) -> Any:
        match line.split():
            case ["backend", *flags] if self._session is None and flags:
                self._begun(BackendChoice(*flags[:2]))
                return None
            case ["model", model, *_] if self._session is None:
                self._begun(BackendChoice("engine", model))
                return None
        result = commands.call(self._begun(), line or "help", self._view())
        if result.leave:
            self.close()
        if result.show is not None:
            Console().print(result.show)
        return None if result.outcome is None else self._value_of(result.outcome)

    def _value_of(self, outcome: Outcome) -> Any:
        for error in (outcome.error, *outcome.invalid):
            if error is not None:
                raise _short(error) from None
        if outcome.stopped:
            print("stopped")
        return outcome.value

    def _view(self) -> View:
        is_notebook = type(self._shell).__name__ == "ZMQInteractiveShell"
        return CellOutput() if is_notebook else Screen(Console())

    def _begun(self, choice: BackendChoice | None = None) -> Session:
        if self._session is None:
            self._session = Session(Opening(choice or BackendChoice()), names=self._shell.user_ns)
            self._session.ready()
        return self._session

    def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            session.close()


def _short(error: BaseException) -> BaseException:
    lines = [line for part in cells.described(error) if part for line in part.split("\n")]
    error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return error


_MAGICS: dict[int, Magic] = {}


def load(shell: Any) -> None:
    """Called by `%load_ext sglang_dsl`."""
    magic = Magic(shell)
    _MAGICS[id(shell)] = magic
    atexit.register(magic.close)
    shell.register_magic_function(magic, magic_kind="line_cell", magic_name=MAGIC)


def unload(shell: Any) -> None:
    """Called by `%unload_ext sglang_dsl`: ends the session."""
    magic = _MAGICS.pop(id(shell), None)
    if magic is not None:
        atexit.unregister(magic.close)
        magic.close()
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop(MAGIC, None)
