"""Lines of standard input, and messages of a chat by prompt_toolkit."""

from __future__ import annotations

import codeop
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dsl.console.session.commands import completions
from sglang_dsl.console.session.session import Session
from sglang_dsl.conversation.requests import totals

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession


def state_file(name: str) -> Path | None:
    """A file in the user's state folder that only this user can read. None if it cannot be written."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "sglang-dsl"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / name
        path.touch(mode=0o600)
        path.chmod(0o600)
    except (OSError, RuntimeError):  # no home
        return None
    return path


def lines_reader(*, chat: bool, names: dict[str, Any] | None = None) -> Callable[[], str]:
    """A function that reads a cell, or a message of a chat, from standard input. It raises EOFError at the
    end. In a terminal, readline edits the lines and completes `names`."""
    first = further = ""
    if sys.stdin.isatty():
        first, further = "> ", ". "
        with contextlib.suppress(ImportError):  # not on every system
            import readline
            import rlcompleter

            readline.set_completer(rlcompleter.Completer(names or {}).complete)
            readline.parse_and_bind("tab: complete")

    def read() -> str:
        typed = _input(first)
        while not chat and not complete(typed):
            try:
                typed += "\n" + _input(further)
            except EOFError:
                break
        return typed

    return read


def _input(mark: str) -> str:
    """input(), with the mark written to standard error if standard output is a pipe."""
    if mark and not sys.stdout.isatty():
        print(mark, end="", file=sys.stderr, flush=True)
        mark = ""
    return input(mark)


def complete(text: str) -> bool:
    """Whether a cell may end here: a command, or whole Python. An empty line ends a block."""
    if not text.strip() or text.lstrip()[:1] in (":", "%"):
        return True
    last = text.rsplit("\n", 1)[-1]
    if "\n" in text and last.strip() and last[0].isspace():
        return False
    try:
        code = codeop.compile_command(text, symbol="exec")
    except (SyntaxError, ValueError, OverflowError):
        return True  # the error is shown when it is run
    if code is None:
        return False
    # "if x: y" and "@decorator" open a block on one line.
    opens_block = text.rstrip().endswith(":") or text.lstrip().startswith("@")
    return "\n" in text or not opens_block


class MessagePrompt:
    """Edits messages of a chat. Raises ImportError without prompt_toolkit."""

    def __init__(self, session: Session, run: Callable[[Callable[[], str]], int]) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import Completer, Completion
        from prompt_toolkit.history import FileHistory, InMemoryHistory

        class Commands(Completer):
            def get_completions(self, document: Any, complete_event: Any) -> Iterator[Completion]:
                for text, replaces, about in completions(session, document.text_before_cursor):
                    yield Completion(text, start_position=-replaces, display_meta=about)

        self._session, self._run = session, run
        file = state_file("chat_history")
        self.pt_app: PromptSession[str] = PromptSession(
            [("ansicyan bold", "› ")],
            history=InMemoryHistory() if file is None else FileHistory(str(file)),
            completer=Commands(),
            complete_while_typing=False,
            bottom_toolbar=lambda: toolbar(session, "/help  Ctrl-C stops  Ctrl-D leaves"),
        )

    def run(self) -> int:
        return self._run(self._read)

    def _read(self) -> str:
        raise_failure(self._session)
        return self.pt_app.prompt()


def toolbar(session: Session, keys: str) -> Any:
    """The line below a prompt: the backend, whether it is open, tokens so far, defaults of generations."""
    ready = ("ansigreen", "●") if session.opening.done() else ("ansiyellow", "○ loading")
    tokens = totals(session.records)["completion_tokens"]
    counted = f"  {tokens} tokens" if tokens else ""
    options = "".join(f"  {name}={value}" for name, value in session.defaults.items())
    grey = "noreverse ansibrightblack"
    return [
        (grey, f" {session.choice} "),
        (f"noreverse {ready[0]}", ready[1]),
        (grey, f"  cell {session.number}{counted}{options}  {keys} "),
    ]


def raise_failure(session: Session) -> None:
    """Raise the error of opening the backend, if there is one by now."""
    if session.opening.done():
        session.opening.result()


def wake(prompt: PromptSession[str] | None, session: Session) -> None:
    """Redraw the prompt, or end it with the error of opening the backend. Safe from any thread."""
    if prompt is None or prompt.app.loop is None or not prompt.app.is_running:
        return
    app, error = prompt.app, session.opening.exception()
    if error is None:
        app.invalidate()
        return

    def end() -> None:
        if app.is_running:
            app.exit(exception=error)

    with contextlib.suppress(RuntimeError):  # the prompt has just ended
        prompt.app.loop.call_soon_threadsafe(end)
