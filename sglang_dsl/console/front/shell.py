"""The prompt on IPython: its editor, history, completion and magics. Needs IPython to be installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher
from IPython.terminal.interactiveshell import TerminalInteractiveShell
from IPython.terminal.prompts import Prompts
from pygments.token import Token  # type: ignore[import-untyped]
from traitlets.config import Config

from sglang_dsl.console.front.prompt import raise_failure, state_file, toolbar
from sglang_dsl.console.session.commands import completions
from sglang_dsl.console.session.session import Session

KEYS = ":help  Ctrl-C stops  Ctrl-O more lines  Ctrl-D leaves"


class Marks(Prompts):
    """❯ before a cell, · before its further lines, nothing before a value."""

    def in_prompt_tokens(self) -> list[tuple[Any, str]]:
        return [(Token.Prompt, "❯ ")]

    def continuation_prompt_tokens(
        self, width: int | None = None, *, lineno: int | None = None, wrap_count: int | None = None
    ) -> list[tuple[Any, str]]:
        return [(Token.Comment, "· ".rjust(width or 2))]

    def out_prompt_tokens(self) -> list[tuple[Any, str]]:
        return []


class Shell(TerminalInteractiveShell):
    """IPython that runs cells in a session; cells with IPython's own syntax (%magics, !commands, name?) it
    runs itself, in the same namespace. `run_line` runs a cell or a command, and returns the exit code if it
    ends the session."""

    def __init__(self, session: Session, run_line: Callable[[str], int | None]) -> None:
        config = Config()
        config.HistoryManager.hist_file = str(state_file("history.sqlite") or ":memory:")
        config.Completer.use_jedi = False
        config.TerminalInteractiveShell.update(
            prompts_class=Marks, term_title=False, confirm_exit=False, show_rewritten_input=False
        )
        super().__init__(config=config, user_ns=session.names)
        self._session, self._run_line = session, run_line
        self.exit_status = 0
        if self.pt_app is not None:  # a dumb terminal has only input()
            self.pt_app.bottom_toolbar = lambda: toolbar(session, KEYS)
        self.Completer.custom_matchers.append(self._match_commands)

    def run_cell(self, raw_cell: str, store_history: bool = False, *args: Any, **kwargs: Any) -> Any:
        if self._has_ipython_syntax(raw_cell):
            return super().run_cell(raw_cell, store_history, *args, **kwargs)  # type: ignore[no-untyped-call]
        if store_history and raw_cell.strip():
            assert self.history_manager is not None
            self.history_manager.store_inputs(self.execution_count, raw_cell)
            self.execution_count += 1
        status = self._run_line(raw_cell)
        if status is not None:
            self.exit_status = status
            self.ask_exit()  # type: ignore[no-untyped-call]
        return None

    def _has_ipython_syntax(self, cell: str) -> bool:
        if cell.lstrip().startswith(":"):
            return False
        if cell.strip() in ("exit", "quit"):
            return True
        python = self.transform_cell(cell)  # type: ignore[no-untyped-call]
        return "get_ipython()" in python and "get_ipython()" not in cell

    def check_complete(self, code: str) -> tuple[str, str]:
        return ("complete", "") if code.lstrip().startswith(":") else super().check_complete(code)

    def prompt_for_code(self) -> str:
        """The next cell. Raises the error of opening the backend as soon as it is known."""
        raise_failure(self._session)
        return str(super().prompt_for_code())  # type: ignore[no-untyped-call]

    def run(self) -> int:
        """Read and run cells until the user leaves. Returns the exit code."""
        self.mainloop()  # type: ignore[no-untyped-call]
        return self.exit_status

    @context_matcher()  # type: ignore[untyped-decorator]
    def _match_commands(self, context: CompletionContext) -> dict[str, Any]:
        before = context.text_until_cursor
        matches = completions(self._session, before) if before.startswith(":") else []
        return {
            "completions": [SimpleCompletion(text, type="command") for text, _, _ in matches],
            "matched_fragment": before[len(before) - matches[0][1] :] if matches else "",
            "suppress": before.startswith(":"),
        }
