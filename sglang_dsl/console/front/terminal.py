"""The prompt in a terminal, and `chat`. Loop runs what is typed and shows what came of it; in `chat` a line
is a message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console

from runtime.protocol.registry import MissingExtra
from sglang_dsl.backends.base import Backend
from sglang_dsl.console.front.banner import banner, help_line
from sglang_dsl.console.front.prompt import Lines, Messages, Reader, has_ipython
from sglang_dsl.console.front.screen import Screen
from sglang_dsl.console.session import commands
from sglang_dsl.console.session.interrupts import answered, held, stoppable
from sglang_dsl.console.session.opening import Opening, Place
from sglang_dsl.console.session.session import Outcome, Session
from sglang_dsl.errors import ProgramError, SglError

REFUSED = frozenset({400, 413})
"""Statuses of requests that are wrong by themselves: the next one may be right."""


class Loop:
    """Runs what is typed and shows what came of it.

    form: what each answer of a chat must match, by the words of gen (regex=, json_schema=, ...).
    stays: a failure does not end it, as somebody is there who sees it.
    """

    def __init__(
        self,
        session: Session,
        screen: Screen,
        reader: Reader | None = None,
        *,
        chat: bool,
        stays: bool,
        form: Mapping[str, Any] | None = None,
    ) -> None:
        """reader: what run() reads lines with; None: the caller reads them and passes each to line()."""
        self._session, self._screen, self._reader = session, screen, reader
        self._chat, self._stays = chat, stays
        # In a pipe, standard output holds answers alone.
        self._aside = screen.console.file if stays or screen.console.is_terminal else sys.stderr
        options = "".join(f", {name}={value!r}" for name, value in (form or {}).items())
        self._answer = f'assistant(gen("answer"{options}))'

    def run(self) -> int:
        """Until the user leaves; the exit code. Ctrl-C stops what runs, and never ends it."""
        assert self._reader is not None
        with held():
            while True:
                if self._stays:
                    print(file=self._aside)
                try:
                    typed = stoppable(self._reader.read)
                except EOFError:
                    if self._stays or sys.stdin.isatty():
                        print(file=self._aside)
                    return 0
                except KeyboardInterrupt:
                    print(file=self._aside)
                    continue
                if (status := self.line(typed)) is not None:
                    return status

    def line(self, typed: str) -> int | None:
        """Run a cell, a message or a command; the exit code if it ends the session."""
        if not typed.strip():
            return None
        marks = (":", "/") if self._chat else (":",)
        with held():
            if typed.lstrip()[:1] in marks:
                return 0 if self._command(typed.lstrip()[1:]) else None
            return None if self._cell(self._message(typed) if self._chat else typed) else 1

    def _stopped(self) -> None:
        self._session.stop()
        answered()
        print("stopped", file=self._aside)

    def _message(self, said: str) -> str:
        return f"s += user({commands.code_of(said)})\ns += {self._answer}"

    def _cell(self, code: str) -> bool:
        """Run it; whether to go on."""
        try:
            made = self._session.run(code, self._screen)
            return stoppable(lambda: self._show(made))
        except KeyboardInterrupt:
            self._stopped()
            return True

    def _show(self, made: Outcome) -> bool:
        error = made.error
        if self._chat and error is not None:
            refused = isinstance(error, ProgramError) and error.status in REFUSED
            kind = "refused" if refused else type(error).__name__
            message = error.message if isinstance(error, ProgramError) else str(error)
            hint = error.hint if isinstance(error, ProgramError) else None
            print(f"\n{kind}: {message}" + (f"\n  {hint}" if hint else ""), file=sys.stderr)
            return refused or self._stays
        if self._chat and made.stopped:
            print(" [stopped]", file=self._aside, flush=True)
            return True
        self._screen.outcome(self._session, made)
        return error is None or self._stays

    def _command(self, line: str) -> bool:
        """Do it; whether to leave."""
        try:
            said = commands.call(self._session, line, self._screen)
            stoppable(lambda: self._came(said))
            return said.leave
        except KeyboardInterrupt:
            self._stopped()
        except (SglError, MissingExtra, OSError) as error:
            self._screen.failed(error)
        return False

    def _came(self, said: commands.Said) -> None:
        if said.show is not None:
            self._screen.console.print(said.show)
        if said.outcome is not None:
            self._screen.outcome(self._session, said.outcome)


def prompt(place: Place, *, words: Mapping[str, Any], system: str | None = None) -> int:
    """The prompt of `sglang-dsl`: IPython if it is installed, else plain lines. Without a terminal, cells are
    read from standard input, and the first that fails ends it with status 1. Raises what opening the backend
    raises."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    session, waiting = _open(place, words)
    try:
        screen = Screen(Console(file=sys.stdout))
        if interactive and has_ipython():
            from sglang_dsl.console.front.shell import Shell

            loop = Loop(session, screen, chat=False, stays=True)
            shell = Shell.instance(session, loop.line)  # IPython's key bindings look for the instance
            waiting.append(shell.wake)
            _begin(session, screen, chat=False, system=system)
            return shell.run()
        _begin(session, screen, chat=False, system=system)
        session.ready(screen)
        reader = Lines(chat=False, names=session.names)
        return Loop(session, screen, reader, chat=False, stays=interactive).run()
    finally:
        session.close()


def chat(place: Place, *, words: Mapping[str, Any], system: str | None, form: Mapping[str, Any]) -> int:
    """A conversation. Raises what opening the backend raises."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    session, waiting = _open(place, words)
    try:
        screen = Screen(Console(file=sys.stdout), chat=True)
        reader = _message_reader(session) if interactive else None
        if reader is not None:
            waiting.append(reader.wake)
        _begin(session, screen, chat=True, system=system)
        if reader is None:
            session.ready(screen)
        return Loop(
            session, screen, reader or Lines(chat=True), chat=True, stays=interactive, form=form
        ).run()
    finally:
        session.close()


def _open(place: Place, words: Mapping[str, Any]) -> tuple[Session, list[Callable[[], None]]]:
    """A session, and what to call when its backend is open, or could not be opened."""
    waiting: list[Callable[[], None]] = []

    def opened() -> None:
        for wake in waiting:
            wake()

    return Session(Opening(place, opened), words=words), waiting


def _message_reader(session: Session) -> Messages | None:
    try:
        return Messages(session)
    except ImportError:
        return None


def _begin(session: Session, screen: Screen, *, chat: bool, system: str | None) -> None:
    """Print what stands above the first line, and begin with the system turn."""
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        screen.console.print(banner(session.place, chat=chat))
    if interactive or (chat and sys.stdin.isatty()):
        aside = screen.console if screen.console.is_terminal else Console(stderr=True)
        aside.print(help_line(chat=chat), style="dim", highlight=False)
    if system is not None:
        session.opening.result()
        commands.call(session, f"system {system}", None)


def converse(
    backend: Backend,
    *,
    system: str | None = None,
    words: Mapping[str, Any] | None = None,
    form: Mapping[str, Any] | None = None,
    ask: Callable[[str], str] | None = None,
    out: TextIO | None = None,
) -> int:
    """A conversation on a backend that is there, which stays open. `ask` reads a message; None: from standard
    input. A message that is refused (too long, say) is forgotten; an answer that fails otherwise ends it with
    status 1."""
    session = Session(Opening.of(Place("mock"), backend), words=words)
    screen = Screen(Console(file=out or sys.stdout), chat=True)
    if screen.console.is_terminal:
        screen.console.print(help_line(chat=True), style="dim", highlight=False)
    if system is not None:
        commands.call(session, f"system {system}", None)
    return Loop(session, screen, Lines(chat=True, ask=ask), chat=True, stays=False, form=form).run()
