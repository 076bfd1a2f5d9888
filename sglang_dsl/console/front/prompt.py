"""Readers of what is typed, without IPython: lines of standard input, and messages of a chat edited with
prompt_toolkit. See shell.py for the prompt on IPython.
"""

from __future__ import annotations

import atexit
import codeop
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from sglang_dsl.console.session.commands import completions
from sglang_dsl.console.session.session import Session
from sglang_dsl.conversation.requests import totals

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession


class Reader(Protocol):
    """Reads what is typed next."""

    def read(self) -> str:
        """Raises EOFError at the end of input, KeyboardInterrupt when the user takes back what was typed."""


def state_file(name: str) -> Path | None:
    """A file in the user's state folder that only this user can read; None if it cannot be written."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "sglang-dsl"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / name
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.fchmod(file, 0o600)
        finally:
            os.close(file)
    except (OSError, RuntimeError):  # no home
        return None
    return path


# -- lines of standard input ---------------------------------------------------------------------------------


class Lines:
    """Lines of standard input, or of `ask`. A cell ends where Python needs no more lines, a message with its
    line. In a terminal, readline edits them, remembers them and completes `names`."""

    def __init__(
        self, *, chat: bool, ask: Callable[[str], str] | None = None, names: dict[str, Any] | None = None
    ) -> None:
        self._chat, self._ask = chat, ask
        if ask is None and sys.stdin.isatty():
            with contextlib.suppress(ImportError):  # not on every system
                _use_readline(names or {}, "chat_lines" if chat else "lines")

    def read(self) -> str:
        ask = self._ask or _ask
        marks = ("> ", ". ") if self._ask is not None or sys.stdin.isatty() else ("", "")
        typed = ask(marks[0])
        while not self._chat and not complete(typed):
            try:
                typed += "\n" + ask(marks[1])
            except EOFError:
                break
        return typed


def _use_readline(names: dict[str, Any], file: str) -> None:
    """Have input() edit lines. Raises ImportError."""
    import readline
    import rlcompleter

    readline.set_completer(rlcompleter.Completer(names).complete)
    readline.parse_and_bind("tab: complete")
    path = state_file(file)
    if path is not None:
        with contextlib.suppress(OSError):
            readline.read_history_file(path)
        atexit.register(_write_lines, path)


def _write_lines(path: Path) -> None:
    import readline

    readline.set_history_length(1000)
    with contextlib.suppress(OSError):
        readline.write_history_file(path)


def _ask(mark: str) -> str:
    """A line of standard input. The mark is written where a person sees it, and into no pipe."""
    if mark and not sys.stdout.isatty():
        print(mark, end="", file=sys.stderr, flush=True)
        mark = ""
    return input(mark)


def complete(text: str) -> bool:
    """Whether a cell may end here: a command, or Python that needs no more lines. A block ends with an empty
    line."""
    if not text.strip() or text.lstrip()[:1] in (":", "%"):
        return True
    last = text.rsplit("\n", 1)[-1]
    if "\n" in text and last.strip() and last[0].isspace():
        return False
    try:
        found = codeop.compile_command(text, symbol="exec")
    except (SyntaxError, ValueError, OverflowError):
        return True  # the error is shown when it is run
    if found is None:
        return False
    # "if x: y" and "@decorator" open a block on one line: an empty line ends it.
    return "\n" in text or not _opens_block(text)


def _opens_block(text: str) -> bool:
    return text.rstrip().endswith(":") or text.lstrip().startswith("@")


# -- prompt_toolkit ------------------------------------------------------------------------------------------


class Messages:
    """Messages of a chat, edited with prompt_toolkit. Raises ImportError if it is not installed."""

    def __init__(self, session: Session) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        self._session = session
        file = state_file("chat_history")
        self._prompt: PromptSession[str] = PromptSession(
            [("ansicyan bold", "› ")],
            history=InMemoryHistory() if file is None else FileHistory(str(file)),
            completer=_commands_completer(session),
            complete_while_typing=False,
            bottom_toolbar=lambda: toolbar(session, "/help  Ctrl-C stops  Ctrl-D leaves"),
        )

    def read(self) -> str:
        raise_failure(self._session)
        return self._prompt.prompt()

    def wake(self) -> None:
        """From any thread: the backend is open, or could not be opened."""
        wake(self._prompt, self._session)


def _commands_completer(session: Session) -> Any:
    from prompt_toolkit.completion import Completer, Completion

    class Commands(Completer):
        def get_completions(self, document: Any, complete_event: Any) -> Iterator[Completion]:
            for text, replaces, about in completions(session, document.text_before_cursor):
                yield Completion(text, start_position=-replaces, display_meta=about)

    return Commands()


def toolbar(session: Session, keys: str) -> Any:
    """The line below a prompt: the backend, whether it is open, tokens so far, defaults of generations."""
    ready = ("ansigreen", "●") if session.opening.done else ("ansiyellow", "○ loading")
    tokens = totals(session.records)["completion_tokens"]
    counted = f"  {tokens} tokens" if tokens else ""
    options = "".join(f"  {name}={value}" for name, value in session.words.items())
    grey = "noreverse ansibrightblack"
    return [
        (grey, f" {session.place} "),
        (f"noreverse {ready[0]}", ready[1]),
        (grey, f"  cell {session.number}{counted}{options}  {keys} "),
    ]


def raise_failure(session: Session) -> None:
    """Raise why the backend could not be opened, if it is known by now."""
    opening = session.opening
    if opening.done and opening.error is not None:
        raise opening.error


def wake(prompt: PromptSession[str], session: Session) -> None:
    """From any thread: show that the backend is open, or end the prompt with why it could not be opened."""
    app, error = prompt.app, session.opening.error
    loop = app.loop
    if loop is None or not app.is_running:
        return
    if error is None:
        app.invalidate()
        return

    def end() -> None:
        if app.is_running:
            app.exit(exception=error)

    with contextlib.suppress(RuntimeError):  # the prompt has just ended
        loop.call_soon_threadsafe(end)


def has_ipython() -> bool:
    """Whether the prompt can run on IPython."""
    try:
        import IPython as IPython
    except ImportError:
        return False
    return True
