"""IPython and its notebooks: after `%load_ext sglang_dsl`

    %%sgl               a cell of a session: `s` lives on, what is generated is shown as it comes
    %sgl COMMAND        a command of it: %sgl backend mock, %sgl undo, %sgl save talk.json; alone: the list

A command that ends with "?", which IPython takes for itself, stands in a cell: %%sgl and then `:fork 2 And
why?`. `s` and the language's words are ordinary names of the notebook, once a session has begun.
"""

from __future__ import annotations

import atexit
import time
from typing import Any

import msgspec
from rich.console import Console

from runtime.protocol.registry import MissingExtra
from sglang_dsl.console.front.screen import Screen
from sglang_dsl.console.session import cell as cells
from sglang_dsl.console.session import commands
from sglang_dsl.console.session.follow import Look, News, View
from sglang_dsl.console.session.opening import Opening, Place
from sglang_dsl.console.session.session import Outcome, Session
from sglang_dsl.console.session.tables import shown
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BadProgram, SglError
from sglang_dsl.views import html
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot

MAGIC = "sgl"
BETWEEN_S = 0.1
"""How long a page stands before it is shown anew: each time it is sent whole."""


class Page:
    """A View: one output of a notebook's cell, replaced while there is more."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown = 0.0
        self._seen: Snapshot | None = None
        self._first_call: int | None = None
        self._news = News()

    def begins(self, look: Look) -> None:
        """The first look tells what there was before."""

    def opens(self, role: str) -> None:
        """On the page by the next look."""

    def says(self, text: str, *, generated: bool) -> None:
        """The same."""

    def ends(self, entry: Transcript) -> None:
        """The same."""

    def closes(self) -> None:
        """The same."""

    def looks(self, seen: Snapshot, forks: list[ForkSnapshot]) -> None:
        if self._first_call is None:
            self._first_call = len(seen.calls)
        fresh = tuple(
            ForkSnapshot(fork.branches, True, fork.at if fork.joined else None)
            for fork in self._news.of(forks)
        )
        self._seen = msgspec.structs.replace(
            seen, forks=fresh, calls=seen.calls[self._first_call :], error=None
        )
        if time.monotonic() - self._shown >= BETWEEN_S:
            self._show()

    def over(self) -> None:
        self._show()

    def waits(self, what: str | None) -> None:
        """A notebook shows by itself that a cell runs."""

    def _show(self) -> None:
        from IPython import display

        seen = self._seen
        if seen is None or (seen.transcript is seen.since and not seen.forks):
            return
        self._shown = time.monotonic()
        text = shown(seen.transcript.text(seen.since))
        data = {"text/plain": text, "text/html": html.page(seen)}
        if self._handle is None:
            shows: Any = display.display
            self._handle = shows(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class Magic:
    """%sgl and %%sgl of one shell."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._session: Session | None = None

    @property
    def _notebook(self) -> bool:
        return type(self._shell).__name__ == "ZMQInteractiveShell"

    def __call__(self, line: str, cell: str | None = None) -> Any:
        """Raises what the cell raised, in the few lines that its writer needs."""
        try:
            if cell is None:
                return self._command(line.strip().removeprefix(":"))
            if cell.lstrip().startswith(":") and not line.strip():
                return self._command(cell.strip().removeprefix(":"))
            if line.strip():
                raise BadProgram(
                    f"%%{MAGIC} takes no arguments on its line; %{MAGIC} {line.strip()} is a command"
                )
            session = self._begun()
            return self._came(session, session.run(cell, self._view()))
        except (SglError, MissingExtra) as error:
            raise _short(error) from None

    def _command(self, line: str) -> Any:
        words = line.split()
        if self._session is None and words[:1] in (["backend"], ["model"]) and len(words) > 1:
            self._begun(Place(*words[1:3]) if words[0] == "backend" else Place("engine", words[1]))
            return None
        session = self._begun()
        said = commands.call(session, line or "help", self._view())
        if said.leave:
            self.close()
        if said.show is not None:
            Console().print(said.show)
        return None if said.outcome is None else self._came(session, said.outcome)

    def _came(self, session: Session, made: Outcome) -> Any:
        if made.error is not None:
            raise _short(made.error) from None
        for error in made.unfit:
            raise _short(error) from None
        if made.stopped:
            print("stopped")
        return made.value

    def _view(self) -> View:
        return Page() if self._notebook else Screen(Console())

    def _begun(self, place: Place | None = None) -> Session:
        if self._session is None:
            self._session = Session(Opening(place or Place()), names=self._shell.user_ns)
            self._session.ready()
        return self._session

    def close(self) -> None:
        """End the session, where there is one."""
        if self._session is not None:
            session, self._session = self._session, None
            session.close()


def _short(error: BaseException) -> BaseException:
    """The same, which IPython shows in a few lines."""
    frames, what = cells.told(error)
    lines = [line for part in (frames, what) if part for line in part.split("\n")]
    error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]
    return error


_MAGICS: dict[int, Magic] = {}


def load(shell: Any) -> None:
    """What `%load_ext sglang_dsl` does."""
    magic = Magic(shell)
    _MAGICS[id(shell)] = magic
    atexit.register(magic.close)
    shell.register_magic_function(magic, magic_kind="line_cell", magic_name=MAGIC)


def unload(shell: Any) -> None:
    """What `%unload_ext sglang_dsl` does: the session ends."""
    magic = _MAGICS.pop(id(shell), None)
    if magic is not None:
        atexit.unregister(magic.close)
        magic.close()
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop(MAGIC, None)
