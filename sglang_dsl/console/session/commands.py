"""The commands of a session: `:undo`, `:save FILE`, ... Those that change the state run a cell, which can be
taken back and exported.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from rich.text import Text

from sglang_dsl.backends import NEED_A_MODEL
from sglang_dsl.console.backend_flag import BackendChoice, backend_names
from sglang_dsl.console.session import files, tables
from sglang_dsl.console.session.follow import View
from sglang_dsl.console.session.interrupts import stoppable
from sglang_dsl.console.session.session import Outcome, Session
from sglang_dsl.errors import BadProgram
from sglang_dsl.function import RUN_WORDS, SglFunction
from sglang_dsl.views.terminal import one_line, printable, render

FORKS = "forks"
"""The name under which `:fork` leaves the branches."""
MAX_FORKS = 64
MAX_COMPLETIONS = 200


@dataclass(frozen=True, slots=True)
class Result:
    """What a command did. `show`: for rich to print; `outcome`: of the cell that it ran; `leave`: whether the
    session ends."""

    show: Any = None
    outcome: Outcome | None = None
    leave: bool = False


Run: TypeAlias = Callable[[Session, str, View | None], Result]


@dataclass(frozen=True, slots=True)
class Command:
    """`takes`: its arguments; `kind`: what they are, for completion ("file", "backend", "name")."""

    run: Run
    takes: str
    about: str
    kind: str


COMMANDS: dict[str, Command] = {}
ALIASES = {"q": "quit", "exit": "quit", "h": "help", "?": "help", "v": "vars", "u": "undo", "r": "retry"}


def _command(name: str, about: str, takes: str = "", kind: str = "") -> Callable[[Run], Run]:
    def add(run: Run) -> Run:
        COMMANDS[name] = Command(run, takes, about, kind)
        return run

    return add


def call(session: Session, line: str, view: View | None = None) -> Result:
    """Run a command line, given without its ":" or "/". Raises BadProgram for an unknown command, and what
    the command raises."""
    name, _, rest = line.strip().partition(" ")
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean :{near[0]}?" if near else ":help lists them"
        raise BadProgram(f"there is no command :{name}; {hint}")
    return command.run(session, rest.strip(), view)


def code_of(text: str) -> str:
    """A Python literal for the text."""
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else repr(text)


def _note(text: str, outcome: Outcome | None = None) -> Result:
    return Result(Text(text, style="dim"), outcome)


@_command("vars", "the variables of s: type, value, tokens")
def _vars(session: Session, rest: str, view: View | None) -> Result:
    table = tables.variables(session)
    return Result(table) if table.row_count else _note("no variables yet")


@_command("text", "the whole conversation as text")
def _text(session: Session, rest: str, view: View | None) -> Result:
    text = printable(session.state.text())
    return Result(Text(text.rstrip("\n"))) if text else _note("nothing yet")


@_command("messages", "the turns as JSON, in the format of chat APIs")
def _messages(session: Session, rest: str, view: View | None) -> Result:
    return Result(Text(tables.messages(session)))


@_command(
    "fork", "ask TEXT in N parallel branches; continue with one; alone: show them", "[N [TEXT] | take N]"
)
def _fork(session: Session, rest: str, view: View | None) -> Result:
    count, _, message = rest.partition(" ")
    forks = session.names.get(FORKS)
    if not rest:
        if forks is None:
            raise BadProgram("no forks yet; :fork 3 What do people eat there?")
        return Result(outcome=Outcome(forks))
    if count == "take":
        if forks is None or not message.isdigit() or int(message) >= len(forks):
            many = "no forks" if forks is None else f"{len(forks)} forks, from 0"
            raise BadProgram(f":fork take N continues with a branch; there are {many}")
        return Result(outcome=session.run(f"s.adopt({FORKS}[{int(message)}])", view))
    if not count.isdigit() or not 1 <= int(count) <= MAX_FORKS:
        raise BadProgram(f":fork takes a number of branches from 1 to {MAX_FORKS}, got {count!r}")
    turns = session.state.messages()
    if not message and (not turns or turns[-1]["role"] == "assistant"):
        raise BadProgram(f"add the question for the branches: :fork {count} And what about Karsk?")
    question = f"user({code_of(message)}) + " if message else ""
    code = f'{FORKS} = s.fork({int(count)})\n{FORKS} += {question}assistant(gen("answer"))'
    return Result(outcome=session.run(code, view))


@_command("undo", "take back the last cell, or the last N", "[N]")
def _undo(session: Session, rest: str, view: View | None) -> Result:
    if rest and not rest.isdigit():
        raise BadProgram(f":undo takes a number of cells, got {rest!r}")
    undone = session.undo(int(rest or 1))
    return _note("\n".join(f"taken back: {one_line(one.code, 100)}" for one in undone))


@_command("retry", "take back the last cell and run it again")
def _retry(session: Session, rest: str, view: View | None) -> Result:
    return Result(outcome=session.retry(view))


@_command("new", "start a new conversation; Python names stay")
def _new(session: Session, rest: str, view: View | None) -> Result:
    outcome = session.run("", view, fresh=True)
    return _note("a new conversation; :undo brings the old one back", outcome)


@_command("system", "start a new conversation with this system turn; alone: show it", "[TEXT]")
def _system(session: Session, rest: str, view: View | None) -> Result:
    if rest:
        return Result(outcome=session.run(f"s += system({code_of(rest)})", view, fresh=True))
    turns = session.state.messages()
    text = next((str(one["content"]) for one in turns if one["role"] == "system"), "no system turn")
    return Result(Text(printable(text)))


def _path(session: Session, rest: str, name: str) -> Path:
    if not rest:
        raise BadProgram(f":{name} takes a file name")
    return session.folder / Path(rest).expanduser()


@_command("save", "save the conversation and the variables to a file", "FILE", "file")
def _save(session: Session, rest: str, view: View | None) -> Result:
    path = _path(session, rest, "save")
    notes = files.save(session, path)
    return _note("\n".join([f"saved as {path}", *notes]))


@_command("load", "continue from a file; runs no code from it", "FILE", "file")
def _load(session: Session, rest: str, view: View | None) -> Result:
    saved = files.load(session, _path(session, rest, "load"))
    text = f"{len(saved.variables)} variables, {len(saved.cells)} cells; nothing was run"
    if saved.backend != session.choice.line:
        text += f"; it was on {saved.backend} (:backend {saved.backend})"
    return _note(text, Outcome(session.state))


@_command("export", "write the session as a program (.py) or a notebook (.ipynb)", "FILE", "file")
def _export(session: Session, rest: str, view: View | None) -> Result:
    path = _path(session, rest, "export")
    return _note(f"{files.export(session, path)}: {path}")


@_command("backend", "continue with another backend", "[NAME|URL [MODEL]]", "backend")
def _backend(session: Session, rest: str, view: View | None) -> Result:
    flags = rest.split()
    if not flags:
        names = "|".join(backend_names())
        return Result(Text(f"{session.choice}; others: :backend {names}|URL [MODEL]"))
    if len(flags) > 2:
        raise BadProgram(":backend takes a name or a server's URL, and a model")
    if flags[0] in NEED_A_MODEL and len(flags) == 1:
        raise BadProgram(f":backend {flags[0]} MODEL: which of its models?")
    return _move(session, BackendChoice(*flags), view)


@_command("model", "continue with another model", "[MODEL]")
def _model(session: Session, rest: str, view: View | None) -> Result:
    here = session.choice
    if not rest:
        return Result(Text(str(here)))
    backend = here.backend if here.backend in NEED_A_MODEL else "engine"
    return _move(session, BackendChoice(backend, rest), view)


def _move(session: Session, choice: BackendChoice, view: View | None) -> Result:
    session.move(choice, view)
    return _note(f"on {choice} from here on")


@_command("set", "set defaults of generations: temperature=0 max_tokens=64", "[NAME=VALUE ...]")
def _set(session: Session, rest: str, view: View | None) -> Result:
    changes: dict[str, Any] = {}
    for pair in rest.split():
        name, equals, value = pair.partition("=")
        if not equals or name not in RUN_WORDS - {"backend", "stream", "budget"}:
            raise BadProgram(f":set takes NAME=VALUE, as temperature=0.7; got {pair!r}")
        try:
            changes[name] = json.loads(value) if value not in ("", "None") else None
        except ValueError:
            changes[name] = value
    if changes:
        session.set_defaults(changes)
    defaults = ", ".join(f"{name}={value!r}" for name, value in session.defaults.items())
    return Result(Text(defaults or "the backend's own defaults; :set temperature=0.7 max_tokens=100"))


@_command("usage", "tokens of each cell: prompt, generated, reused, jumped")
def _usage(session: Session, rest: str, view: View | None) -> Result:
    return Result(tables.usage(session))


@_command("time", "seconds of each cell, to the first token, tokens per second")
def _time(session: Session, rest: str, view: View | None) -> Result:
    return Result(tables.times(session))


@_command(
    "trace",
    "the state as a tree with its calls; or a program's nodes, without running it",
    "[PROGRAM]",
    "name",
)
def _trace(session: Session, rest: str, view: View | None) -> Result:
    if not rest:
        return Result(render(session.whole()))
    program = session.names.get(rest)
    if not isinstance(program, SglFunction):
        programs = (name for name, one in session.names.items() if isinstance(one, SglFunction))
        raise BadProgram(f"{rest!r} is not a program; there are: {', '.join(programs) or 'none'}")
    return Result(Text(printable(stoppable(lambda: program.trace().tree()))))


@_command("help", "this list", "[COMMAND]")
def _help(session: Session, rest: str, view: View | None) -> Result:
    if rest:
        name = rest.lstrip(":/")
        command = COMMANDS.get(ALIASES.get(name, name))
        if command is None:
            raise BadProgram(f"there is no command :{name}; :help lists them")
        return Result(Text(f":{name} {command.takes}".rstrip() + f"\n  {command.about}"))
    table = tables.plain_table("command", "")
    for name, one in COMMANDS.items():
        table.add_row(Text(f":{name} {one.takes}".rstrip(), style="cyan"), one.about)
    table.add_section()
    adds = 'adds a turn; assistant(gen("name")) has one generated'
    table.add_row(Text("s += user(...)", style="green"), adds)
    reads = "what was generated; s alone shows all as a tree"
    table.add_row(Text('s["name"]', style="green"), reads)
    return Result(table)


@_command("quit", "leave; so does Ctrl-D")
def _quit(session: Session, rest: str, view: View | None) -> Result:
    return Result(leave=True)


# -- completion ----------------------------------------------------------------------------------------------


def completions(session: Session, before: str) -> list[tuple[str, int, str]]:
    """Completions of a command line, `before` being its text before the cursor with the ":" or "/": each a
    text, how many characters it replaces, and a description. Empty for any other line."""
    if before[:1] not in (":", "/"):
        return []
    name, space, rest = before[1:].partition(" ")
    if not space:
        matching = ((one, command) for one, command in sorted(COMMANDS.items()) if one.startswith(name))
        return [(before[0] + one, len(before), command.about) for one, command in matching]
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        return []
    start = rest.rpartition("/")[2] if command.kind == "file" else rest
    matches = [one for one in _arguments(session, command.kind, rest) if one.startswith(start)]
    return [(one, len(start), "") for one in matches[:MAX_COMPLETIONS]]


def _arguments(session: Session, kind: str, rest: str) -> Iterable[str]:
    """All arguments of this kind; for files, those in the folder that was typed."""
    match kind:
        case "file":
            folder, slash, start = rest.rpartition("/")
            try:
                inside = sorted((session.folder / Path(folder + slash).expanduser()).iterdir())
            except OSError:
                return []
            names = (one.name + "/" * one.is_dir() for one in inside)
            return [name for name in names if start or not name.startswith(".")]
        case "backend":
            return backend_names()
        case "name":
            return [name for name in sorted(session.names) if rest or not name.startswith("_")]
        case _:
            return []
