"""The prompt in a terminal, and `chat`: reads, has the session do it, shows what came of it. Both are one
loop; in `chat` a line is a message.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rich.console import Console

from runtime.protocol.registry import MissingExtra
from sglang_dsl.backends.base import Backend
from sglang_dsl.console.front.banner import banner, help_line
from sglang_dsl.console.front.prompt import Editor, Lines, Reader, require
from sglang_dsl.console.front.screen import Screen
from sglang_dsl.console.session import commands
from sglang_dsl.console.session.interrupts import answered, held, stoppable
from sglang_dsl.console.session.opening import Opening, Place
from sglang_dsl.console.session.session import Outcome, Session
from sglang_dsl.errors import ProgramError, SglError

REFUSED = frozenset({400, 413})
"""Statuses of requests that are wrong by themselves: the next one may be right."""


class Loop:
    """`form`: what each answer of a chat must match, as gen says it (regex=, json_schema=, ...). `stays`: a
    failure does not end it, as somebody is there who sees it."""

    def __init__(
        self,
        session: Session,
        screen: Screen,
        reader: Reader,
        *,
        chat: bool,
        stays: bool,
        form: Mapping[str, Any],
    ) -> None:
        self._session, self._screen, self._reader = session, screen, reader
        self._chat, self._stays = chat, stays
        # In a pipe, standard output holds answers alone.
        self._aside = screen.console.file if stays or screen.console.is_terminal else sys.stderr
        given = "".join(f", {name}={value!r}" for name, value in form.items())
        self._answer = f'assistant(gen("answer"{given}))'

    def run(self) -> int:
        """Until the user leaves; the exit code. Ctrl-C stops what runs, and never ends it."""
        with held():
            return self._run()

    def _run(self) -> int:
        while True:
            if self._stays:
                print(file=self._aside)
            try:
                said = stoppable(self._reader.read)
            except EOFError:
                if self._stays or sys.stdin.isatty():
                    print(file=self._aside)
                return 0
            except KeyboardInterrupt:
                print(file=self._aside)
                continue
            if not said.strip():
                continue
            marks = (":", "/") if self._chat else (":",)
            if said.lstrip()[:1] in marks:
                if self._command(said.lstrip()[1:]):
                    return 0
            elif not self._cell(self._message(said) if self._chat else said):
                return 1

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
    """The prompt of `sglang-dsl`. Without a terminal, cells are read from standard input, and the first that
    fails ends it with status 1. Raises what opening the backend raises, MissingExtra."""
    return _session(place, words=words, system=system, chat=False, form={})


def chat(place: Place, *, words: Mapping[str, Any], system: str | None, form: Mapping[str, Any]) -> int:
    """A conversation. Raises what opening the backend raises."""
    return _session(place, words=words, system=system, chat=True, form=form)


def _session(
    place: Place, *, words: Mapping[str, Any], system: str | None, chat: bool, form: Mapping[str, Any]
) -> int:
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive and not chat:
        require()
    reader: list[Reader] = []

    def there() -> None:
        for one in reader:
            one.wake()

    session = Session(Opening(place, there), words=words)
    try:
        screen = Screen(Console(file=sys.stdout), chat=chat)
        if interactive:
            try:
                reader.append(Editor(session, chat=chat))
            except MissingExtra:
                if not chat:
                    raise
        if not reader:
            reader.append(Lines(chat=chat))
        if interactive:
            screen.console.print(banner(place, chat=chat))
        else:
            session.ready()
        if interactive or (chat and sys.stdin.isatty()):
            aside = screen.console if screen.console.is_terminal else Console(stderr=True)
            aside.print(help_line(chat=chat), style="dim", highlight=False)
        if system is not None:
            session.opening.result()
            commands.call(session, f"system {system}", None)
        return Loop(session, screen, reader[0], chat=chat, stays=interactive, form=form).run()
    finally:
        session.close()


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
    return Loop(session, screen, Lines(chat=True, ask=ask), chat=True, stays=False, form=form or {}).run()
