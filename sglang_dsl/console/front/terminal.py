"""The prompt in a terminal, and `chat`, whose lines are messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from runtime.protocol.console import version
from runtime.protocol.registry import MissingExtra
from sglang_dsl.console.backend_flag import BackendChoice, Opening
from sglang_dsl.console.front import prompt as prompts
from sglang_dsl.console.front.screen import Screen
from sglang_dsl.console.session import commands, interrupts
from sglang_dsl.console.session.interrupts import stoppable
from sglang_dsl.console.session.session import Outcome, Session
from sglang_dsl.errors import ProgramError, SglError

REFUSED = frozenset({400, 413})
"""HTTP statuses of requests that are wrong themselves, so that the next one may succeed."""
EXAMPLE = 's += user("Which river runs through Ostrel?") + assistant(gen("river"))'
QUESTIONS = {
    "lands": "Which river runs through Ostrel?   Who rules Hesper?   (Karsk, Velmora, Quillan, ...)",
    "sums": "What is 47 + 38?",
    "moods": "Is this positive or negative? What a lovely garden!",
    "JSON": "Meet Mobi Stax from Caturn: 42 years old, works as a potter. Extract name and age as JSON.",
}
"""What pocket can answer."""
HELP = "Type Python. Ctrl-C stops an answer; :help lists commands; Ctrl-D leaves."
CHAT_HELP = (
    "Type a message. Ctrl-C stops an answer; /new begins again; /help lists commands; "
    "/quit or the end of input leaves."
)


class Loop:
    """Runs what the user types and shows the results. `stays`: continue after a failure, as a user sees it.
    `form`: the constraint of each answer of a chat, by gen's keyword arguments."""

    def __init__(
        self,
        session: Session,
        screen: Screen,
        reader: Any = None,
        *,
        chat: bool,
        stays: bool,
        form: Mapping[str, Any] | None = None,
    ) -> None:
        """reader: its read() gives the lines, if run() gets no function for them."""
        self._session, self._screen, self._reader = session, screen, reader
        self._chat, self._stays = chat, stays
        # In a pipe, standard output contains only answers.
        self._notes = screen.console.file if stays or screen.console.is_terminal else sys.stderr
        options = "".join(f", {name}={value!r}" for name, value in (form or {}).items())
        self._answer = f'assistant(gen("answer"{options}))'

    @interrupts.held()
    def run(self, read: Callable[[], str] | None = None) -> int:
        """Read and run until `read` raises EOFError, or a command leaves. Returns the exit code. Ctrl-C stops
        what runs, or discards the line that is typed."""
        source: Callable[[], str] = read or self._reader.read
        while True:
            if self._stays:
                print(file=self._notes)
            try:
                typed = stoppable(source)
            except EOFError:
                if self._stays or sys.stdin.isatty():
                    print(file=self._notes)
                return 0
            except KeyboardInterrupt:
                print(file=self._notes)
                continue
            if (status := self.line(typed)) is not None:
                return status

    @interrupts.held()
    def line(self, typed: str) -> int | None:
        """Run a cell, a message or a command. Returns the exit code if it ends the session."""
        if not typed.strip():
            return None
        marks = (":", "/") if self._chat else (":",)
        try:
            if typed.lstrip()[:1] in marks:
                return 0 if self._command(typed.lstrip()[1:]) else None
            if self._chat:
                typed = f"s += user({commands.code_of(typed)})\ns += {self._answer}"
            outcome = self._session.run(typed, self._screen)
            return None if stoppable(lambda: self._show(outcome)) else 1
        except KeyboardInterrupt:
            self._session.stop()
            interrupts.clear()
            print("stopped", file=self._notes)
            return None

    def _show(self, outcome: Outcome) -> bool:
        """Show the result of a cell; returns whether to continue."""
        error = outcome.error
        if self._chat and error is not None:
            refused = isinstance(error, ProgramError) and error.status in REFUSED
            kind = "refused" if refused else type(error).__name__
            message = error.message if isinstance(error, ProgramError) else str(error)
            hint = error.hint if isinstance(error, ProgramError) else None
            print(f"\n{kind}: {message}" + (f"\n  {hint}" if hint else ""), file=sys.stderr)
            return refused or self._stays
        if self._chat and outcome.stopped:
            print(" [stopped]", file=self._notes, flush=True)
            return True
        self._screen.outcome(self._session, outcome)
        return error is None or self._stays

    def _command(self, line: str) -> bool:
        """Run a command and show its result; returns whether to leave."""

        def show() -> None:
            if result.show is not None:
                self._screen.console.print(result.show)
            if result.outcome is not None:
                self._screen.outcome(self._session, result.outcome)

        try:
            result = commands.call(self._session, line, self._screen)
            stoppable(show)
        except (SglError, MissingExtra, OSError) as error:
            self._screen.failed(error)
            return False
        return result.leave


def run(
    choice: BackendChoice,
    *,
    chat: bool,
    defaults: Mapping[str, Any],
    system: str | None = None,
    form: Mapping[str, Any] | None = None,
) -> int:
    """The prompt of `sglang-dsl`, or `chat`. In a terminal, IPython and prompt_toolkit edit the lines if they
    are installed. Without a terminal, the first cell that fails ends it with exit code 1. Raises the error of
    opening the backend."""
    has_input = sys.stdin.isatty()
    interactive = has_input and sys.stdout.isatty()
    opening = Opening(choice)
    session = Session(opening, defaults=defaults)
    try:
        screen = Screen(Console(file=sys.stdout), chat=chat)
        loop = Loop(session, screen, chat=chat, stays=interactive, form=form)
        editor = _editor(session, loop, chat=chat) if interactive else None
        if editor is not None:
            opening.add_done_callback(lambda _: prompts.wake(editor.pt_app, session))
        if interactive:
            screen.console.print(banner(choice, chat=chat))
        if interactive or (chat and has_input):
            notes = screen.console if screen.console.is_terminal else Console(stderr=True)
            notes.print(CHAT_HELP if chat else HELP, style="dim", highlight=False)
        if system is not None:
            opening.result()
            commands.call(session, f"system {system}")
        if editor is not None:
            return int(editor.run())
        session.ready(screen)
        return loop.run(prompts.lines_reader(chat=chat, names=session.names))
    finally:
        session.close()


def _editor(session: Session, loop: Loop, *, chat: bool) -> Any:
    """Reads and runs lines with IPython, or messages with prompt_toolkit. None if that is not installed."""
    try:
        if chat:
            return prompts.MessagePrompt(session, loop.run)
        from sglang_dsl.console.front.shell import Shell

        return Shell.instance(session, loop.line)  # IPython's key bindings look for the instance
    except ImportError:
        return None


def banner(choice: BackendChoice, *, chat: bool) -> RenderableType:
    """The backend, what the bundled model can answer, and an example."""
    lines: list[RenderableType] = []
    if choice.is_pocket:
        about = "pocket is a small model that comes with this package. It was trained on an invented world:"
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(style="dim")
        grid.add_column(overflow="fold")
        for what, question in QUESTIONS.items():
            grid.add_row(what, Text(question, style="cyan"))
        lines += [Text(about), Padding(grid, (0, 0, 0, 2))]
    if not chat:
        hint = Text.assemble(("s", "bold"), " is the conversation. Try it, ", ("Tab", "bold"), " completes:")
        lines += [hint, Padding(Text(EXAMPLE, style="green"), (0, 0, 0, 2))]
    title = Text.assemble(
        (" sglang-dsl ", "bold"), (f"{version()} ", "dim"), ("on ", "dim"), (f"{choice} ", "bold cyan")
    )
    if not lines:
        return title
    return Panel(Group(*lines), title=title, title_align="left", border_style="bright_black", padding=(0, 1))
