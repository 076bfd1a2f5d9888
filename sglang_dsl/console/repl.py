"""A conversation in the terminal: a program that is run once for each message, over what was said before.
Knows no backend in particular."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from sglang_dsl import api
from sglang_dsl.backends.base import Backend
from sglang_dsl.errors import ProgramError
from sglang_dsl.function import function
from sglang_dsl.state.program_state import ProgramState

HELP = "Type a message. Ctrl-C stops an answer; /new begins again; /quit or the end of input leaves."
REFUSED = frozenset({400, 413})
"""Statuses of requests that are wrong by themselves: the next one may be right."""
MOST_HISTORY = 1000
_LEAVE = frozenset({"/quit", "/exit"})

Turn = tuple[str, str]


@function
def conversation(
    s: ProgramState, opening: str | None, said: Sequence[Turn], message: str, form: dict[str, Any]
) -> None:
    if opening is not None:
        s += api.system(opening)
    for asked, answered in said:
        s += api.user(asked)
        s += api.assistant(answered)
    s += api.user(message)
    s += api.assistant(api.gen("answer", **form))


def converse(
    backend: Backend,
    *,
    system: str | None = None,
    words: dict[str, Any] | None = None,
    form: dict[str, Any] | None = None,
    ask: Callable[[str], str] | None = None,
    out: TextIO | None = None,
) -> int:
    """Read messages and stream answers until the user leaves. A message that is refused (too long, say) is
    forgotten; an answer that fails otherwise ends it with status 1. `form`: what each answer must match, as
    gen says it (regex=, json_schema=, ...). `ask`: reads a message; None: from standard input, in a terminal
    with line editing and a history."""
    out = out or sys.stdout
    print(HELP, file=out)
    said: list[Turn] = []
    program = conversation.options(**(words or {})).bind(opening=system, form=form or {})
    with _lines() if ask is None else contextlib.nullcontext(ask) as read:
        while True:
            try:
                message = read("> ")
            except EOFError:
                print(file=out)
                return 0
            except KeyboardInterrupt:
                print(file=out)
                continue
            if message.strip() in _LEAVE:
                return 0
            if message.strip() == "/new":
                said.clear()
            elif message.strip():
                try:
                    answer = _answer(
                        program.run(said=tuple(said), message=message, backend=backend, stream=True), out
                    )
                except ProgramError as error:
                    if error.status not in REFUSED:
                        _tell(f"{type(error).__name__}: {error.message}", error.hint)
                        return 1
                    _tell(f"refused: {error.message}", error.hint)
                    continue
                if answer:
                    said.append((message, answer))


def _answer(state: ProgramState, out: TextIO) -> str:
    """Print the answer as it comes; what there is of it when the user stops it is the answer."""
    text = ""
    with state:
        try:
            for piece in state.text_iter("answer"):
                text += piece
                print(piece, end="", flush=True, file=out)
        except KeyboardInterrupt:
            state.cancel()
            print(" [stopped]", end="", file=out)
    print(file=out, flush=True)
    return text


def _tell(what: str, hint: str | None) -> None:
    # The error's place in a program would be in this file, which tells the user nothing.
    print(f"\n{what}" + (f"\n  {hint}" if hint else ""), file=sys.stderr)


# -- the terminal --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _lines() -> Iterator[Callable[[str], str]]:
    """What reads a line. In a terminal it can be edited, and is kept for the arrow keys, of later sessions
    too, in a file that only this user can read; where there is no place for that, of this session only."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        yield input
        return
    try:
        import readline
    except ImportError:  # not on every system
        yield input
        return
    path = _history_file()
    if path is not None:
        with contextlib.suppress(OSError, UnicodeError):
            readline.read_history_file(path)
    readline.set_history_length(MOST_HISTORY)

    def read(prompt: str) -> str:
        line = input(prompt)
        if path is not None and line.strip():
            with contextlib.suppress(OSError):
                readline.write_history_file(path)
        return line

    yield read


def _history_file() -> Path | None:
    """Of this user, with nobody else's eyes on it; None where it cannot be written."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "sglang-dsl"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / "chat_history"
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.fchmod(file, 0o600)
        finally:
            os.close(file)
    except (OSError, RuntimeError):  # no home
        return None
    return path
