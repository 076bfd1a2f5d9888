"""A conversation in the terminal: one program whose state goes on from turn to turn. Knows no backend in
particular."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TextIO

from sglang_dsl import api
from sglang_dsl.backends.base import Backend
from sglang_dsl.errors import ProgramError
from sglang_dsl.function import function
from sglang_dsl.state import ProgramState

HELP = "Type a message; an empty line, /quit or the end of input leaves."
_LEAVE = frozenset({"", "/quit", "/exit"})


@function
def conversation(s: ProgramState, opening: str | None) -> None:
    if opening is not None:
        s += api.system(opening)


def converse(
    backend: Backend,
    *,
    system: str | None = None,
    words: dict[str, Any] | None = None,
    form: dict[str, Any] | None = None,
    ask: Callable[[str], str] = input,
    out: TextIO | None = None,
) -> int:
    """Read messages and stream answers until the user leaves. A failed answer ends it with status 1.
    `form`: what each answer must match, as gen says it (regex=, json_schema=, ...)."""
    out = out or sys.stdout
    print(HELP, file=out)
    state = conversation.options(**(words or {})).run(system, backend=backend, stream=True)
    state.sync()
    turn = 0
    while True:
        try:
            text = ask("> ")
        except (EOFError, KeyboardInterrupt):
            print(file=out)
            return 0
        if text.strip() in _LEAVE:
            return 0
        turn += 1
        state += api.user(text)
        state += api.assistant(api.gen(f"answer{turn}", **(form or {})))
        try:
            for piece in state.text_iter(f"answer{turn}"):
                print(piece, end="", flush=True, file=out)
        except ProgramError as error:
            # Its place in a program would be here, which tells the user nothing.
            advice = f"\n  {error.hint}" if error.hint else ""
            print(f"\n{type(error).__name__}: {error.message}{advice}", file=sys.stderr)
            return 1
        print(file=out)
