"""A session in a terminal: what a cell says, printed as it comes, in colour; forks as a tree that grows while
they run."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
from typing import IO, TextIO, cast

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.pretty import Pretty
from rich.status import Status
from rich.text import Text

from sglang_dsl.console.front.forks import GENERATED, ROLES, conversation, running_tree, tree
from sglang_dsl.console.session import cell
from sglang_dsl.console.session.follow import Look, News
from sglang_dsl.console.session.session import Outcome, Session
from sglang_dsl.console.session.tables import footnote, shown
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.state.base import StateBase
from sglang_dsl.state.branches import Group as Forks
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot
from sglang_dsl.views.terminal import render

LABEL = 11
_TOKENS = re.compile(r"\n|[^\S\n]+|\S+")


class Column:
    """Text that is written piece by piece and wrapped between words, its lines indented."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._at = self._indent = 0
        self._word: list[tuple[str, str]] = []
        self._space = ""
        self._lock = threading.RLock()

    @property
    def fresh(self) -> bool:
        """Whether a line begins here."""
        return self._at == 0 and not self._word

    def label(self, text: str, style: str) -> None:
        """Begin a line with it; what follows is indented behind it."""
        self.line()
        self._indent = LABEL
        self._out(f"{text:<{LABEL}}", style)
        self._at = max(LABEL, cell_len(text))

    def write(self, text: str, style: str = "") -> None:
        """More text. Its last word may be held back until it has ended."""
        with self._lock:
            for part in _TOKENS.findall(text):
                if part == "\n":
                    self._flush()
                    self._out("\n" + " " * self._indent)
                    self._at, self._space = self._indent, ""
                elif part.isspace():
                    self._flush()
                    self._space += part
                else:
                    self._word.append((part, style))

    def flush(self) -> None:
        """Write what is held back."""
        with self._lock:
            self._flush()

    def line(self) -> None:
        """End the line, where one has begun."""
        with self._lock:
            self._flush()
            if self._at:
                self._out("\n")
            self._at = self._indent = 0
            self._space = ""

    def _flush(self) -> None:
        if not self._word:
            return
        wide = sum(cell_len(part) for part, _ in self._word)
        room = self._console.width if self._console.is_terminal else sys.maxsize
        if self._at + cell_len(self._space) + wide > room and self._at > self._indent:
            self._out("\n" + " " * self._indent)
            self._at = self._indent
        elif self._space:
            self._out(self._space)
            self._at += cell_len(self._space)
        for part, style in self._word:
            self._out(part, style)
        self._at, self._word, self._space = self._at + wide, [], ""

    def _out(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), end="", soft_wrap=True, highlight=False)


class Screen:
    """A View. `chat`: of a conversation only what the model says is shown, without names."""

    def __init__(self, console: Console, *, chat: bool = False) -> None:
        self.console, self._chat = console, chat
        self._column = Column(console)
        self._hidden = self._broken_off = False
        self._role: str | None = None
        self._live: Live | None = None
        self._status: Status | None = None
        self._news = News()
        self._forks: list[ForkSnapshot] = []
        self._standard: IO[str] | None = None
        self._lock = threading.RLock()  # of what is alive: the cell's own thread may print meanwhile

    # -- a View ----------------------------------------------------------------------------------------------

    def begins(self, look: Look) -> None:
        self._news, self._forks = News(), []
        if sys.stdout is self.console.file:
            self._standard = sys.stdout
            sys.stdout = _Through(self, look, sys.stdout)

    def over(self) -> None:
        if self._standard is not None:
            sys.stdout.flush()
        self._end_live()
        self._column.line()
        self._role, self._hidden = None, False
        if self._standard is not None:
            sys.stdout, self._standard = cast(TextIO, self._standard), None
        for fork in self._forks:
            self.console.print(tree(fork))

    def opens(self, role: str) -> None:
        self._end_live()
        self._hidden = self._chat and role != "assistant"
        self._role = role
        self._begin_turn(role)

    def _begin_turn(self, role: str) -> None:
        self._broken_off = False
        if self._chat:
            self._column.line()
        else:
            self._column.label(shown(role), f"bold {ROLES.get(role, 'white')}")

    def says(self, text: str, *, generated: bool) -> None:
        if self._hidden:
            return
        self._end_live()
        if self._broken_off and self._role is not None:
            self._begin_turn(self._role)
        style = "" if self._chat else (GENERATED if generated else "")
        self._column.write(shown(text), style)

    def ends(self, entry: Transcript) -> None:
        if self._hidden or self._chat:
            return
        if entry.reasoning:
            self._column.write(f" (after {len(entry.reasoning)} characters of reasoning)", "dim italic")
        if entry.chosen:
            self._column.write(f" ⟵ {shown(entry.chosen)}", "dim")
        self._column.flush()

    def closes(self) -> None:
        if not self._hidden:
            self._column.line()
        self._hidden, self._role = False, None

    def looks(self, seen: Snapshot, forks: list[ForkSnapshot]) -> None:
        self._forks = self._news.of(forks)
        growing = [fork for fork in forks if not fork.joined and any(one.running for one in fork.branches)]
        if not growing or not self.console.is_terminal:
            self._end_live()
            return
        shape = running_tree(growing, self.console.width)
        with self._lock:
            if self._live is None:
                self._column.line()
                self._live = Live(
                    console=self.console, transient=True, auto_refresh=False,
                    redirect_stdout=False, redirect_stderr=False,
                )  # fmt: skip
                self._live.start()
            self._live.update(shape, refresh=True)

    def waits(self, what: str | None) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if what is not None and self.console.is_terminal:
            self._status = self.console.status(what, spinner="dots", spinner_style="cyan")
            self._status.start()

    # -- the rest --------------------------------------------------------------------------------------------

    def printed(self, text: str, out: IO[str]) -> None:
        """The cell prints something. A turn that is broken off by it begins anew behind it."""
        self._end_live()
        self._broken_off = self._role is not None and not self._hidden
        self._column.line()
        out.write(text)

    def outcome(self, session: Session, made: Outcome) -> None:
        """Show what came of a cell, apart from what it said."""
        if made.error is not None:
            self.failed(made.error)
            return
        if made.stopped:
            kept = "; the text so far stays" if made.kept else ""
            self.console.print(Text(f"stopped{kept}", style="dim"))
            return
        for error in made.unfit:
            self.failed(error)
        if made.value is not None:
            self.value(session, made.value)
            session.names["_"] = made.value
        if not self._chat and session.cells and (told := footnote(session)):
            self.console.print(Text(told, style="dim"), highlight=False)

    def value(self, session: Session, value: object) -> None:
        """A value, as it is best read."""
        if value is session.state:
            self.console.print(conversation(session.whole()))
        elif isinstance(value, StateBase):
            self.console.print(render(value.core.snapshot(None)))
        elif isinstance(value, Forks):
            seen = tuple(state.core.snapshot(None) for state in value)
            self.console.print(tree(ForkSnapshot(seen, False)))
        else:
            self.console.print(Pretty(value))

    def failed(self, error: BaseException) -> None:
        """An error, in as few lines as tell it."""
        frames, what = cell.told(error)
        if frames:
            self.console.print(Text(shown(frames), style="dim"), highlight=False)
        head, _, rest = shown(what).partition("\n")
        self.console.print(Text(head, style="red"), highlight=False)
        if rest:
            self.console.print(Text(rest, style="dim" if "Error" in head else "red"), highlight=False)

    def _end_live(self) -> None:
        with self._lock:
            if self._live is not None:
                live, self._live = self._live, None
                with contextlib.suppress(OSError):
                    live.stop()


class _Through(io.TextIOBase):
    """Standard output while a cell runs: what was said before stands before it."""

    def __init__(self, screen: Screen, look: Look, out: IO[str]) -> None:
        self._screen, self._look, self._out = screen, look, out
        self._line = ""

    def write(self, text: str) -> int:
        self._line += text
        whole, newline, self._line = self._line.rpartition("\n")
        if newline:
            self._look(lambda: self._screen.printed(whole + newline, self._out))
        return len(text)

    def flush(self) -> None:
        if self._line:
            line, self._line = self._line, ""
            self._look(lambda: self._screen.printed(line, self._out))
        self._out.flush()

    def isatty(self) -> bool:
        return self._out.isatty()

    def fileno(self) -> int:
        return self._out.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(getattr(self._out, "encoding", "utf-8"))
