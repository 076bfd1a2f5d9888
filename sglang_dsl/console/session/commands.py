"""The commands of a session, by name: `:undo`, `:save FILE`, ... Each takes the session and the rest of its
line, and gives what to show. What a command does to the state it does as a cell, so that it can be taken back
and exported.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from sglang_dsl.backends import BACKENDS, NEED_A_MODEL
from sglang_dsl.console.session import saved, tables
from sglang_dsl.console.session.export import export
from sglang_dsl.console.session.follow import View
from sglang_dsl.console.session.interrupts import stoppable
from sglang_dsl.console.session.opening import Place
from sglang_dsl.console.session.session import Outcome, Session
from sglang_dsl.errors import BadProgram
from sglang_dsl.function import RUN_OPTIONS, SglFunction
from sglang_dsl.views.terminal import render

FORKS = "forks"
"""The name under which `:fork` leaves the branches."""


@dataclass(frozen=True, slots=True)
class Said:
    """What came of a command. show: something rich can print; outcome: of the cell that it ran; leave: the
    session is to end."""

    show: Any = None
    outcome: Outcome | None = None
    leave: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """takes: what stands behind its name; kind: what that is, for completion ("file", "backend", "name")."""

    does: Callable[[Session, str, View | None], Said]
    takes: str
    about: str
    kind: str = ""


def call(session: Session, line: str, view: View | None = None) -> Said:
    """Do what a line says, without the mark it begins with. Raises BadProgram for an unknown command, and
    what the command raises."""
    name, _, rest = line.strip().partition(" ")
    found = COMMANDS.get(ALIASES.get(name, name))
    if found is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        meant = f"did you mean :{near[0]}?" if near else ":help lists them"
        raise BadProgram(f"there is no command :{name}; {meant}")
    return found.does(session, rest.strip(), view)


def code_of(given: str) -> str:
    """Text as Python writes it, so that a cell can hold it."""
    return json.dumps(given, ensure_ascii=False) if given.isprintable() else repr(given)


def _help(session: Session, rest: str, view: View | None) -> Said:
    if rest:
        name = rest.lstrip(":/")
        found = COMMANDS.get(ALIASES.get(name, name))
        if found is None:
            raise BadProgram(f"there is no command :{name}; :help lists them")
        return Said(Text(f":{name} {found.takes}".rstrip() + f"\n  {found.about}"))
    made = tables.plain_table("command", "")
    for name, one in COMMANDS.items():
        made.add_row(Text(f":{name} {one.takes}".rstrip(), style="cyan"), one.about)
    made.add_section()
    made.add_row(
        Text("s += user(...)", style="green"), 'adds a turn; assistant(gen("name")) has one generated'
    )
    made.add_row(Text('s["name"]', style="green"), "what was generated; s alone shows all as a tree")
    return Said(made)


def _vars(session: Session, rest: str, view: View | None) -> Said:
    table = tables.variables(session)
    return Said(table if table.row_count else Text("no variables yet", style="dim"))


def _text(session: Session, rest: str, view: View | None) -> Said:
    said = tables.shown(session.state.text())
    return Said(Text(said.rstrip("\n")) if said else Text("nothing yet", style="dim"))


def _messages(session: Session, rest: str, view: View | None) -> Said:
    return Said(Text(tables.messages(session)))


def _fork(session: Session, rest: str, view: View | None) -> Said:
    count, _, message = rest.partition(" ")
    held = session.names.get(FORKS)
    if not rest:
        if held is None:
            raise BadProgram("no forks yet; :fork 3 What do people eat there?")
        return Said(outcome=Outcome(held))
    if count == "take":
        if held is None or not message.isdigit() or int(message) >= len(held):
            many = "no forks" if held is None else f"{len(held)} forks, from 0"
            raise BadProgram(f":fork take N continues with a branch; there are {many}")
        return Said(outcome=session.run(f"s.adopt({FORKS}[{int(message)}])", view))
    if not count.isdigit() or not 1 <= int(count) <= 64:
        raise BadProgram(f":fork takes a number of branches from 1 to 64, got {count!r}")
    turns = session.state.messages()
    if not message and (not turns or turns[-1]["role"] == "assistant"):
        raise BadProgram(f"add the question for the branches: :fork {count} And what about Karsk?")
    asked = f"user({code_of(message)}) + " if message else ""
    return Said(
        outcome=session.run(
            f'{FORKS} = s.fork({int(count)})\n{FORKS} += {asked}assistant(gen("answer"))', view
        )
    )


def _undo(session: Session, rest: str, view: View | None) -> Said:
    if rest and not rest.isdigit():
        raise BadProgram(f":undo takes a number of cells, got {rest!r}")
    taken = session.undo(int(rest or 1))
    return Said(Text("\n".join(f"taken back: {tables.line(one.code, 100)}" for one in taken), style="dim"))


def _retry(session: Session, rest: str, view: View | None) -> Said:
    return Said(outcome=session.retry(view))


def _new(session: Session, rest: str, view: View | None) -> Said:
    outcome = session.run("", view, fresh=True)
    return Said(Text("a new conversation; :undo brings the old one back", style="dim"), outcome)


def _system(session: Session, rest: str, view: View | None) -> Said:
    if not rest:
        turns = session.state.messages()
        held = next((str(one["content"]) for one in turns if one["role"] == "system"), None)
        return Said(Text("no system turn" if held is None else tables.shown(held)))
    return Said(outcome=session.run(f"s += system({code_of(rest)})", view, fresh=True))


def _path(session: Session, rest: str, name: str) -> Path:
    if not rest:
        raise BadProgram(f":{name} takes a file name")
    return session.folder / Path(rest).expanduser()


def _save(session: Session, rest: str, view: View | None) -> Said:
    path = _path(session, rest, "save")
    lost = saved.save(session, path)
    return Said(Text("\n".join([f"saved as {path}", *lost]), style="dim"))


def _load(session: Session, rest: str, view: View | None) -> Said:
    found = saved.load(session, _path(session, rest, "load"))
    told = f"{len(found.variables)} variables, {len(found.cells)} cells; nothing was run"
    if found.backend != session.place.line:
        told += f"; it was on {found.backend} (:backend {found.backend})"
    return Said(Text(told, style="dim"), Outcome(session.state))


def _export(session: Session, rest: str, view: View | None) -> Said:
    path = _path(session, rest, "export")
    return Said(Text(f"{export(session, path)}: {path}", style="dim"))


def _backend(session: Session, rest: str, view: View | None) -> Said:
    words = rest.split()
    if not words:
        return Said(
            Text(
                f"{session.place}; others: :backend {'|'.join(BACKENDS.names())}|URL [MODEL]".replace(
                    "endpoint|", ""
                )
            )
        )
    if len(words) > 2:
        raise BadProgram(":backend takes a name or a server's URL, and a model")
    if words[0] in NEED_A_MODEL and len(words) == 1:
        raise BadProgram(f":backend {words[0]} MODEL: which of its models?")
    return _moved(session, Place(*words), view)


def _model(session: Session, rest: str, view: View | None) -> Said:
    here = session.place
    if not rest:
        return Said(Text(str(here)))
    takes = here.backend if here.backend in NEED_A_MODEL else "engine"
    return _moved(session, Place(takes, rest), view)


def _moved(session: Session, place: Place, view: View | None) -> Said:
    session.move(place, view)
    return Said(Text(f"on {place} from here on", style="dim"))


def _set(session: Session, rest: str, view: View | None) -> Said:
    if not rest:
        said = ", ".join(f"{name}={value!r}" for name, value in session.words.items())
        return Said(Text(said or "the backend's own defaults; :set temperature=0.7 max_tokens=100"))
    words: dict[str, Any] = {}
    for pair in rest.split():
        name, equals, value = pair.partition("=")
        if not equals or name not in RUN_OPTIONS - {"backend", "stream", "budget"}:
            raise BadProgram(f":set takes NAME=VALUE, as temperature=0.7; got {pair!r}")
        try:
            words[name] = json.loads(value) if value not in ("", "None") else None
        except ValueError:
            words[name] = value
    session.set_words(words)
    return _set(session, "", view)


def _usage(session: Session, rest: str, view: View | None) -> Said:
    return Said(tables.usage(session))


def _time(session: Session, rest: str, view: View | None) -> Said:
    return Said(tables.times(session))


def _trace(session: Session, rest: str, view: View | None) -> Said:
    if not rest:
        return Said(render(session.whole()))
    found = session.names.get(rest)
    if not isinstance(found, SglFunction):
        have = (
            ", ".join(name for name, one in session.names.items() if isinstance(one, SglFunction)) or "none"
        )
        raise BadProgram(f"{rest!r} is not a program; there are: {have}")
    return Said(Text(tables.shown(stoppable(lambda: found.trace().tree()))))


def _quit(session: Session, rest: str, view: View | None) -> Said:
    return Said(leave=True)


COMMANDS = {
    "vars": Command(_vars, "", "the variables of s: type, value, tokens"),
    "text": Command(_text, "", "the whole conversation as text"),
    "messages": Command(_messages, "", "the turns as JSON, in the format of chat APIs"),
    "fork": Command(
        _fork, "[N [TEXT] | take N]", "ask TEXT in N parallel branches; continue with one; alone: show them"
    ),
    "undo": Command(_undo, "[N]", "take back the last cell, or the last N"),
    "retry": Command(_retry, "", "take back the last cell and run it again"),
    "new": Command(_new, "", "start a new conversation; Python names stay"),
    "system": Command(_system, "[TEXT]", "start a new conversation with this system turn; alone: show it"),
    "save": Command(_save, "FILE", "save the conversation and the variables to a file", "file"),
    "load": Command(_load, "FILE", "continue from a file; runs no code from it", "file"),
    "export": Command(_export, "FILE", "write the session as a program (.py) or a notebook (.ipynb)", "file"),
    "backend": Command(_backend, "[NAME|URL [MODEL]]", "continue with another backend", "backend"),
    "model": Command(_model, "[MODEL]", "continue with another model"),
    "set": Command(_set, "[NAME=VALUE ...]", "set defaults of generations: temperature=0 max_tokens=64"),
    "usage": Command(_usage, "", "tokens of each cell: prompt, generated, reused, jumped"),
    "time": Command(_time, "", "seconds of each cell, to the first token, tokens per second"),
    "trace": Command(
        _trace,
        "[PROGRAM]",
        "the state as a tree with its calls; or a program's nodes, without running it",
        "name",
    ),
    "help": Command(_help, "[COMMAND]", "this list"),
    "quit": Command(_quit, "", "leave; so does Ctrl-D"),
}
ALIASES = {"q": "quit", "exit": "quit", "h": "help", "?": "help", "v": "vars", "u": "undo", "r": "retry"}
MOST_COMPLETIONS = 200


def completions(session: Session, before: str) -> list[tuple[str, int, str]]:
    """What may stand at the cursor of a command, ":" or "/" included. Each is the text, how many characters
    before the cursor it replaces, and what it is; none for a line that is no command."""
    if before[:1] not in (":", "/"):
        return []
    name, space, rest = before[1:].partition(" ")
    if not space:
        return [
            (before[0] + one, len(before), command.about)
            for one, command in sorted(COMMANDS.items())
            if one.startswith(name)
        ]
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        return []
    start = rest.rpartition("/")[2] if command.kind == "file" else rest
    found = (one for one in _arguments(session, command.kind, rest) if one.startswith(start))
    return [(one, len(start), "") for one in list(found)[:MOST_COMPLETIONS]]


def _arguments(session: Session, kind: str, rest: str) -> Iterable[str]:
    """All arguments of this kind; for files, the ones in the folder of what was typed."""
    match kind:
        case "file":
            folder, slash, start = rest.rpartition("/")
            try:
                inside = sorted((session.folder / Path(folder + slash).expanduser()).iterdir())
            except OSError:
                return []
            named = (one.name + "/" * one.is_dir() for one in inside)
            return [one for one in named if start or not one.startswith(".")]
        case "backend":
            return [name for name in BACKENDS.names() if name != "endpoint"]
        case "name":
            return [name for name in sorted(session.names) if rest or not name.startswith("_")]
        case _:
            return []
