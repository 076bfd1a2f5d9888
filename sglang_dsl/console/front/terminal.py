"""The prompt in a terminal, and `chat`, whose lines are messages."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
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


class Loop:
    """Runs what the user types and shows the results.

    read    reads what is typed; raises EOFError at the end, and KeyboardInterrupt to discard a line. None:
            the caller passes each line to line()
    stays   continue after a failure, as a user sees it
    form    the constraint of each answer of a chat, by gen's keyword arguments
    """

    def __init__(
        self,
        session: Session,
        screen: Screen,
        read: Callable[[], str] | None = None,
        *,
        chat: bool,
        stays: bool,
        form: Mapping[str, Any] | None = None,
    ) -> None:
        self._session, self._screen, self._read = session, screen, read
        self._chat, self._stays = chat, stays
        # In a pipe, standard output contains only answers.
        self._notes = screen.console.file if stays or screen.console.is_terminal else sys.stderr
        options = "".join(f", {name}={value!r}" for name, value in (form or {}).items())
        self._answer = f'assistant(gen("answer"{options}))'

    def run(self) -> int:
        """Read and run until the user leaves. Returns the exit code. Ctrl-C stops what runs, not the loop."""
        assert self._read is not None
        with interrupts.held():
            while True:
                if self._stays:
                    print(file=self._notes)
                try:
                    typed = stoppable(self._read)
                except EOFError:
                    if self._stays or sys.stdin.isatty():
                        print(file=self._notes)
                    return 0
                except KeyboardInterrupt:
                    print(file=self._notes)
                    continue
                if (status := self.line(typed)) is not None:
                    return status

    def line(self, typed: str) -> int | None:
        """Run a cell, a message or a command. Returns the exit code if it ends the session."""
        if not typed.strip():
            return None
        marks = (":", "/") if self._chat else (":",)
        with interrupts.held():
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


def prompt(choice: BackendChoice, *, defaults: Mapping[str, Any], system: str | None = None) -> int:
    """The prompt of `sglang-dsl`: IPython if it is installed, else plain lines. Without a terminal, cells are
    read from standard input, and the first that fails ends it with exit code 1. Raises the error of opening
    the backend."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    session, on_open = _open(choice, defaults)
    try:
        screen = Screen(Console(file=sys.stdout))
        shell_type = _ipython_shell() if interactive else None
        if shell_type is not None:
            loop = Loop(session, screen, chat=False, stays=True)
            shell = shell_type.instance(session, loop.line)  # IPython's key bindings look for the instance
            on_open.append(shell.wake)
            _begin(session, screen, chat=False, system=system)
            return int(shell.run())
        _begin(session, screen, chat=False, system=system)
        session.ready(screen)
        read = prompts.lines_reader(chat=False, names=session.names)
        return Loop(session, screen, read, chat=False, stays=interactive).run()
    finally:
        session.close()


def chat(
    choice: BackendChoice, *, defaults: Mapping[str, Any], system: str | None, form: Mapping[str, Any]
) -> int:
    """A conversation. Raises the error of opening the backend."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    session, on_open = _open(choice, defaults)
    try:
        screen = Screen(Console(file=sys.stdout), chat=True)
        editor = prompts.message_prompt(session) if interactive else None
        if editor is not None:
            on_open.append(partial(prompts.wake, editor, session))
        _begin(session, screen, chat=True, system=system)
        if editor is None:
            session.ready(screen)
            read = prompts.lines_reader(chat=True)
        else:
            read = partial(prompts.read_message, editor, session)
        return Loop(session, screen, read, chat=True, stays=interactive, form=form).run()
    finally:
        session.close()


def _ipython_shell() -> Any:
    """The class Shell; None if IPython is not installed."""
    try:
        from sglang_dsl.console.front.shell import Shell
    except ImportError:
        return None
    return Shell


def _open(choice: BackendChoice, defaults: Mapping[str, Any]) -> tuple[Session, list[Callable[[], None]]]:
    """A session, and a list of functions that are called when its backend is open, or failed to."""
    on_open: list[Callable[[], None]] = []

    def opened() -> None:
        for call in on_open:
            call()

    return Session(Opening(choice, opened), defaults=defaults), on_open


def _begin(session: Session, screen: Screen, *, chat: bool, system: str | None) -> None:
    """Print the banner and the help line, and add the system turn."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        screen.console.print(banner(session.choice, chat=chat))
    if interactive or (chat and sys.stdin.isatty()):
        notes = screen.console if screen.console.is_terminal else Console(stderr=True)
        notes.print(_help_line(chat=chat), style="dim", highlight=False)
    if system is not None:
        session.opening.result()
        commands.call(session, f"system {system}", None)


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


def _help_line(*, chat: bool) -> str:
    if not chat:
        return "Type Python. Ctrl-C stops an answer; :help lists commands; Ctrl-D leaves."
    return (
        "Type a message. Ctrl-C stops an answer; /new begins again; /help lists commands; "
        "/quit or the end of input leaves."
    )
