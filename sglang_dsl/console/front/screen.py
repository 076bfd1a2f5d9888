"""A session in a terminal: text while it is generated, forks as a tree while they run."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from typing import IO, TextIO, cast

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.pretty import Pretty
from rich.status import Status
from rich.text import Text

from sglang_dsl.console.session import cell
from sglang_dsl.console.session.commands import footnote
from sglang_dsl.console.session.follow import Look, View, branch_text
from sglang_dsl.console.session.session import Outcome, Session
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.state.base import StateBase
from sglang_dsl.state.branches import Group as Forks
from sglang_dsl.views import terminal
from sglang_dsl.views.snapshot import ForkSnapshot, Snapshot

_TOKENS = re.compile(r"\n|[^\S\n]+|\S+")


class Column:
    """Text that is written in pieces, wrapped between words, with an indent. rich wraps only whole texts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._at = self._indent = 0
        self._word: list[tuple[str, str]] = []
        self._space = ""

    def label(self, text: str, style: str) -> None:
        """Begin a line with a label; the following text is indented behind it."""
        self.line()
        self._indent = terminal.LABEL
        self._out(f"{text:<{terminal.LABEL}}", style)
        self._at = max(terminal.LABEL, cell_len(text))

    def write(self, text: str, style: str = "") -> None:
        """More text. Its last word is held back until it is complete, or flush()."""
        for part in _TOKENS.findall(text):
            if part == "\n":
                self.flush()
                self._out("\n" + " " * self._indent)
                self._at, self._space = self._indent, ""
            elif part.isspace():
                self.flush()
                self._space += part
            else:
                self._word.append((part, style))

    def line(self) -> None:
        """End the line, if one has begun."""
        self.flush()
        if self._at:
            self._out("\n")
        self._at = self._indent = 0
        self._space = ""

    def flush(self) -> None:
        """Write the last word."""
        if not self._word:
            return
        width = sum(cell_len(part) for part, _ in self._word)
        limit = self._console.width if self._console.is_terminal else sys.maxsize
        if self._at + cell_len(self._space) + width > limit and self._at > self._indent:
            self._out("\n" + " " * self._indent)
            self._at = self._indent
        elif self._space:
            self._out(self._space)
            self._at += cell_len(self._space)
        for part, style in self._word:
            self._out(part, style)
        self._at, self._word, self._space = self._at + width, [], ""

    def _out(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), end="", soft_wrap=True, highlight=False)


class Screen(View):
    """Shows cells in a terminal. `chat`: only the model's text, without names of turns and variables."""

    def __init__(self, console: Console, *, chat: bool = False) -> None:
        self.console, self._chat = console, chat
        self._column = Column(console)
        self._seen: Transcript | None = None
        self._partial = 0
        self._role: str | None = None
        self._hidden = self._interrupted = False
        self._live: Live | None = None
        self._status: Status | None = None
        self._forks: list[ForkSnapshot] = []
        self._standard: IO[str] | None = None

    # -- a View ----------------------------------------------------------------------------------------------

    def begin(self, look: Look) -> None:
        self._forks, self._seen, self._partial = [], None, 0
        if sys.stdout is self.console.file:
            self._standard = sys.stdout
            sys.stdout = _StandardOutput(self, look, sys.stdout)

    def update(self, seen: Snapshot, changed: list[ForkSnapshot]) -> None:
        for entry in seen.transcript.entries(self._seen or seen.since):
            self._show(entry)
        self._seen = seen.transcript
        if len(seen.partial) > self._partial:
            self._write(seen.partial[self._partial :], generated=True)
            self._partial = len(seen.partial)
        self._forks = changed
        growing = [
            fork for fork in seen.forks if not fork.joined and any(one.running for one in fork.branches)
        ]
        if not growing or not self.console.is_terminal:
            self._end_live()
            return
        if self._live is None:
            self._column.line()
            self._live = Live(
                console=self.console, transient=True, auto_refresh=False,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start()
        texts = ((fork, [branch_text(branch) for branch in fork.branches]) for fork in growing)
        self._live.update(terminal.running_forks(texts, self.console.width), refresh=True)

    def end(self) -> None:
        if self._standard is not None:
            sys.stdout.flush()
        self._end_live()
        self._column.line()
        self._role, self._hidden = None, False
        if self._standard is not None:
            sys.stdout, self._standard = cast(TextIO, self._standard), None
        for fork in self._forks:
            self.console.print(terminal.fork_tree(fork))

    def wait(self, what: str | None) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None
        if what is not None and self.console.is_terminal:
            self._status = self.console.status(what, spinner="dots", spinner_style="cyan")
            self._status.start()

    def printed(self, text: str, out: IO[str]) -> None:
        """The cell prints something. An interrupted turn is labelled again when it continues."""
        self._end_live()
        self._interrupted = self._role is not None and not self._hidden
        self._column.line()
        out.write(text)

    # -- the text of a cell ----------------------------------------------------------------------------------

    def _show(self, entry: Transcript) -> None:
        if entry.kind == "open":
            self._end_live()
            self._hidden = self._chat and entry.value != "assistant"
            self._begin_turn(entry.value)
        elif entry.kind == "close":
            if not self._hidden:
                self._column.line()
            self._hidden, self._role = False, None
        elif entry.kind == "text" and entry.chosen is not None:
            self._write(entry.value[self._partial :], generated=True)
            self._partial = 0
            if self._hidden or self._chat:
                return
            if entry.reasoning:
                self._column.write(f" (after {len(entry.reasoning)} characters of reasoning)", "dim italic")
            if entry.chosen:
                self._column.write(f" ⟵ {terminal.printable(entry.chosen)}", "dim")
            self._column.flush()
        else:
            self._write(entry.plain, generated=False)

    def _begin_turn(self, role: str) -> None:
        self._role, self._interrupted = role, False
        if self._chat:
            self._column.line()
        else:
            self._column.label(terminal.printable(role), f"bold {terminal.ROLES.get(role, 'white')}")

    def _write(self, text: str, *, generated: bool) -> None:
        if self._hidden or not text:
            return
        self._end_live()
        if self._interrupted and self._role is not None:
            self._begin_turn(self._role)
        self._column.write(
            terminal.printable(text), terminal.GENERATED if generated and not self._chat else ""
        )

    def _end_live(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            with contextlib.suppress(OSError):
                live.stop()

    # -- values and errors -----------------------------------------------------------------------------------

    def outcome(self, session: Session, outcome: Outcome) -> None:
        if outcome.error is not None:
            self.failed(outcome.error)
            return
        if outcome.stopped:
            kept = "; the text so far stays" if outcome.kept else ""
            self.console.print(Text(f"stopped{kept}", style="dim"))
            return
        for error in outcome.invalid:
            self.failed(error)
        if outcome.value is not None:
            self.value(session, outcome.value)
            session.names["_"] = outcome.value
        if not self._chat and session.cells and (note := footnote(session)):
            self.console.print(Text(note, style="dim"), highlight=False)

    def value(self, session: Session, value: object) -> None:
        if value is session.state:
            self.console.print(terminal.conversation(session.whole()))
        elif isinstance(value, StateBase):
            self.console.print(terminal.render(value.core.snapshot(None)))
        elif isinstance(value, Forks):
            branches = tuple(state.core.snapshot(None) for state in value)
            self.console.print(terminal.fork_tree(ForkSnapshot(branches, False)))
        else:
            self.console.print(Pretty(value))

    def failed(self, error: BaseException) -> None:
        frames, message = cell.described(error)
        head, _, rest = terminal.printable(message).partition("\n")
        rest_style = "dim" if "Error" in head else "red"
        for text, style in ((terminal.printable(frames), "dim"), (head, "red"), (rest, rest_style)):
            if text:
                self.console.print(Text(text, style=style), highlight=False)


class _StandardOutput(io.TextIOBase):
    """sys.stdout while a cell runs: earlier generated text is shown before a printed line."""

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
