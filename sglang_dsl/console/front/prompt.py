"""What is typed: with prompt_toolkit in a terminal (history, completion, several lines, colours), else plain
lines."""

from __future__ import annotations

import codeop
import contextlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from runtime.protocol.registry import MissingExtra
from sglang_dsl.console.front import history
from sglang_dsl.console.session.commands import ALIASES, COMMANDS
from sglang_dsl.console.session.complete import completions
from sglang_dsl.console.session.session import Session
from sglang_dsl.conversation.usage import totals

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyPressEvent

INDENT = "    "


class Reader(Protocol):
    """Reads what is typed next."""

    def read(self) -> str:
        """Raises EOFError at the end of input, KeyboardInterrupt when the user takes back what was typed."""

    def wake(self) -> None:
        """From any thread: the backend is there, or could not be opened."""


class Lines:
    """Lines of standard input; a cell ends where Python needs no more, or `ask` gives one."""

    def __init__(
        self, *, chat: bool, ask: Callable[[str], str] | None = None, out: TextIO | None = None
    ) -> None:
        self._chat, self._ask, self._out = chat, ask, out
        if ask is None and sys.stdin.isatty():
            with contextlib.suppress(ImportError):  # not on every system
                import readline as readline  # input() then edits lines

    def read(self) -> str:
        ask = self._ask or _ask
        marks = ("> ", ". ") if self._ask is not None or sys.stdin.isatty() else ("", "")
        said = ask(marks[0])
        while not self._chat and not complete(said):
            try:
                said += "\n" + ask(marks[1])
            except EOFError:
                break
        return said

    def wake(self) -> None:
        """It looks for itself."""


def _ask(mark: str) -> str:
    """A line of standard input. The mark goes where a person sees it, and into no pipe."""
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
        return True  # it is told when it is run
    if found is None:
        return False
    # "if x: y" and "@decorator" open a block on one line: an empty line ends it.
    return "\n" in text or not _opens_block(text)


def _opens_block(text: str) -> bool:
    return text.rstrip().endswith(":") or text.lstrip().startswith("@")


def require() -> None:
    """Raises MissingExtra where prompt_toolkit is not installed."""
    try:
        import prompt_toolkit as prompt_toolkit
    except ImportError as error:
        raise MissingExtra("the prompt needs prompt_toolkit: pip install 'sglang-dsl[repl]'") from error


class Editor:
    """A line editor. Raises MissingExtra where prompt_toolkit is not installed."""

    def __init__(self, session: Session, *, chat: bool) -> None:
        require()
        import prompt_toolkit

        self._session, self._chat = session, chat
        self._failed = False
        file = history.state_file("chat_history" if chat else "history")
        self._prompt: Any = prompt_toolkit.PromptSession(
            history=_history(file),
            completer=_completer(session, chat=chat),
            complete_while_typing=False,
            lexer=None if chat else _lexer(),
            style=_style(),
            include_default_pygments_style=False,
            multiline=True,
            key_bindings=_keys(chat=chat),
            prompt_continuation=lambda width, line, wrapped: [("class:more", "· ".rjust(width))],
            bottom_toolbar=self._toolbar,
            enable_open_in_editor=True,
            mouse_support=False,
        )

    def read(self) -> str:
        self._stop_on_failure()
        mark = "› " if self._chat else "❯ "
        try:
            return str(self._prompt.prompt([("class:mark", mark)]))
        except _Failed:
            self._stop_on_failure()
            raise

    def wake(self) -> None:
        app = self._prompt.app
        loop = app.loop
        if loop is None or not app.is_running:
            return
        if self._session.opening.error is None:
            app.invalidate()
        else:
            with contextlib.suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._prompt.app.is_running:
            self._prompt.app.exit(exception=_Failed())

    def _stop_on_failure(self) -> None:
        opening = self._session.opening
        if opening.done and opening.error is not None:
            raise opening.error

    def _toolbar(self) -> Any:
        session = self._session
        ready = session.opening.done
        state = ("class:ready", "●") if ready else ("class:loading", "○ loading")
        sums = totals(session.records)
        told = f"  {sums['completion_tokens']} tokens" if sums["completion_tokens"] else ""
        words = "".join(f"  {name}={value}" for name, value in session.words.items())
        mark = "/" if self._chat else ":"
        more = "" if self._chat else "  Alt-Enter more lines"
        return [
            ("class:bar", f" {session.place} "), state,
            ("class:bar", f"  cell {session.number}{told}{words}  {mark}help"),
            ("class:bar", f"  Ctrl-C stops{more}  Ctrl-D leaves "),
        ]  # fmt: skip


class _Failed(Exception):
    """The backend could not be opened while a line was read."""


def _history(file: Any) -> Any:
    from prompt_toolkit.history import History

    class Kept(History):
        def load_history_strings(self) -> Iterable[str]:
            return [] if file is None else reversed(history.read(file))

        def store_string(self, string: str) -> None:
            if file is not None and string.strip():
                history.write(file, [string])

    return Kept()


def _completer(session: Session, *, chat: bool) -> Any:
    from prompt_toolkit.completion import Completer, Completion
    from prompt_toolkit.document import Document

    kinds = {name: one.kind for name, one in COMMANDS.items()} | dict.fromkeys(ALIASES, "")
    kinds = {name: kind for name, kind in kinds.items() if name not in ALIASES}

    class Found(Completer):
        def get_completions(self, document: Document, complete_event: Any) -> Iterable[Completion]:
            before = document.text_before_cursor
            if chat and before[:1] not in (":", "/"):
                return
            for text, replaces in completions(session, before, kinds):
                told = COMMANDS[text[1:]].says if text[:1] in (":", "/") and text[1:] in COMMANDS else ""
                yield Completion(text, start_position=-replaces, display_meta=told)

    return Found()


def _lexer() -> Any:
    from prompt_toolkit.lexers import DynamicLexer, PygmentsLexer, SimpleLexer
    from pygments.lexers.python import PythonLexer  # type: ignore[import-untyped]

    python, command = PygmentsLexer(PythonLexer), SimpleLexer("class:command")

    def chosen() -> Any:
        from prompt_toolkit.application import get_app

        return command if get_app().current_buffer.text.startswith(":") else python

    return DynamicLexer(chosen)


def _style() -> Any:
    from prompt_toolkit.styles import Style

    return Style.from_dict(
        {
            "mark": "ansicyan bold",
            "more": "ansibrightblack",
            "command": "ansicyan",
            "bottom-toolbar": "noreverse ansibrightblack",
            "bar": "ansibrightblack",
            "ready": "ansigreen",
            "loading": "ansiyellow",
            "pygments.keyword": "ansimagenta",
            "pygments.keyword.constant": "ansimagenta",
            "pygments.literal.string": "ansigreen",
            "pygments.literal.number": "ansiyellow",
            "pygments.comment": "ansibrightblack italic",
            "pygments.name.builtin": "ansicyan",
            "pygments.name.function": "ansiblue",
            "pygments.name.class": "ansiblue bold",
            "pygments.name.decorator": "ansiblue",
            "pygments.operator.word": "ansimagenta",
            "completion-menu.completion": "bg:ansibrightblack ansiwhite",
            "completion-menu.completion.current": "bg:ansicyan ansiblack",
            "completion-menu.meta.completion": "bg:ansibrightblack ansiwhite",
            "completion-menu.meta.completion.current": "bg:ansicyan ansiblack",
        }
    )


def _keys(*, chat: bool) -> Any:
    from prompt_toolkit.filters import completion_is_selected, has_completions
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter", filter=~completion_is_selected)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        before = buffer.document.text_before_cursor
        if chat or (buffer.document.is_cursor_at_the_end and complete(buffer.text)):
            buffer.validate_and_handle()
            return
        last = before.rsplit("\n", 1)[-1]
        deeper = INDENT if last.rstrip().endswith(":") else ""
        buffer.insert_text("\n" + last[: len(last) - len(last.lstrip())] + deeper)

    @keys.add("enter", filter=completion_is_selected)
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.complete_state = None

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("tab", filter=~has_completions)
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        line = buffer.document.current_line_before_cursor
        if not chat and not line.strip():
            buffer.insert_text(INDENT)
        else:
            buffer.start_completion(insert_common_part=True)

    return keys
