"""The commands of a session, `:undo`, `:save FILE`, ... Those that change the state run a cell."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.table import Table
from rich.text import Text

from sglang_dsl.backends import NEED_A_MODEL
from sglang_dsl.console.backend_flag import BackendChoice, backend_names
from sglang_dsl.console.session import files
from sglang_dsl.console.session.follow import View
from sglang_dsl.console.session.interrupts import stoppable
from sglang_dsl.console.session.session import Outcome, Session
from sglang_dsl.conversation.requests import COUNTED, CallRecord, totals
from sglang_dsl.errors import BadProgram
from sglang_dsl.function import RUN_OPTIONS, SglFunction
from sglang_dsl.views.terminal import one_line, printable, render

FORKS = "forks"
"""The name under which `:fork` leaves the branches."""
MAX_FORKS = 64
CELL_WIDTH = 60
MAX_COMPLETIONS = 200
T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Result:
    """`show`: for rich to print; `outcome`: of the cell that it ran; `leave`: ends the session."""

    show: Any = None
    outcome: Outcome | None = None
    leave: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """`takes`: its arguments; `kind`: what they are, for completion ("file", "backend", "name")."""

    about: str
    takes: str
    kind: str
    run: Callable[[Commands, str], Result]


COMMANDS: dict[str, Command] = {}
ALIASES = {"q": "quit", "exit": "quit", "h": "help", "?": "help", "v": "vars", "u": "undo", "r": "retry"}


def _command(about: str, takes: str = "", kind: str = "") -> Callable[[T], T]:
    def add(method: T) -> T:
        COMMANDS[method.__name__] = Command(about, takes, kind, method)
        return method

    return add


def call(session: Session, line: str, view: View | None = None) -> Result:
    """Run a command line, without its ":" or "/". Raises BadProgram, and what the command raises."""
    name, _, rest = line.strip().partition(" ")
    if (command := _named(name)) is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean :{near[0]}?" if near else ":help lists them"
        raise BadProgram(f"there is no command :{name}; {hint}")
    return command.run(Commands(session, view), rest.strip())


def _named(name: str) -> Command | None:
    return COMMANDS.get(ALIASES.get(name, name))


def code_of(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else repr(text)


def _note(text: str, outcome: Outcome | None = None) -> Result:
    return Result(Text(text, style="dim"), outcome)


def _table(*heads: str, right: Iterable[str] = ()) -> Table:
    """An empty table without lines; the columns `right` are numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        if head in right:
            table.add_column(head, justify="right", no_wrap=True)
        else:
            table.add_column(head, overflow="fold")
    return table


def _counts(calls: tuple[CallRecord, ...]) -> list[str]:
    sums = totals(calls)
    return [str(sums["calls"]), *(str(sums[key]) for key in COUNTED)]


class Commands:
    """A method for each command, which takes the rest of its line."""

    def __init__(self, session: Session, view: View | None) -> None:
        self._session, self._view = session, view

    def _run(self, code: str, *, fresh: bool = False) -> Outcome:
        return self._session.run(code, self._view, fresh=fresh)

    @_command("the variables of s: type, value, tokens")
    def vars(self, rest: str) -> Result:
        table = _table("name", "type", "value", "tokens", right=("tokens",))
        for name, one in self._session.state.snapshot().variables.items():
            kind = type(one.value).__name__
            value = one.value if isinstance(one.value, str) else repr(one.value)
            if one.status == "failed":
                kind, value = "failed", str(one.error)
            count = one.meta.get("completion_tokens")
            table.add_row(
                Text(printable(name), style="cyan"),
                Text(kind, style="dim"),
                Text(one_line(value, CELL_WIDTH)),
                "" if count is None else str(count),
            )
        return Result(table) if table.row_count else _note("no variables yet")

    @_command("the whole conversation as text")
    def text(self, rest: str) -> Result:
        text = printable(self._session.state.text())
        return Result(Text(text.rstrip("\n"))) if text else _note("nothing yet")

    @_command("the turns as JSON, in the format of chat APIs")
    def messages(self, rest: str) -> Result:
        turns = self._session.state.messages()
        return Result(Text(printable(json.dumps(turns, ensure_ascii=False, indent=2, default=str))))

    @_command("ask TEXT in N parallel branches; continue with one; alone: show them", "[N [TEXT] | take N]")
    def fork(self, rest: str) -> Result:
        count, _, message = rest.partition(" ")
        forks = self._session.names.get(FORKS)
        if not rest:
            if forks is None:
                raise BadProgram("no forks yet; :fork 3 What do people eat there?")
            return Result(outcome=Outcome(forks))
        if count == "take":
            if forks is None or not message.isdigit() or int(message) >= len(forks):
                many = "no forks" if forks is None else f"{len(forks)} forks, from 0"
                raise BadProgram(f":fork take N continues with a branch; there are {many}")
            return Result(outcome=self._run(f"s.adopt({FORKS}[{int(message)}])"))
        if not count.isdigit() or not 1 <= int(count) <= MAX_FORKS:
            raise BadProgram(f":fork takes a number of branches from 1 to {MAX_FORKS}, got {count!r}")
        turns = self._session.state.messages()
        if not message and (not turns or turns[-1]["role"] == "assistant"):
            raise BadProgram(f"add the question for the branches: :fork {count} And what about Karsk?")
        question = f"user({code_of(message)}) + " if message else ""
        code = f'{FORKS} = s.fork({int(count)})\n{FORKS} += {question}assistant(gen("answer"))'
        return Result(outcome=self._run(code))

    @_command("take back the last cell, or the last N", "[N]")
    def undo(self, rest: str) -> Result:
        if rest and not rest.isdigit():
            raise BadProgram(f":undo takes a number of cells, got {rest!r}")
        undone = self._session.undo(int(rest or 1))
        return _note("\n".join(f"taken back: {one_line(one.code, 100)}" for one in undone))

    @_command("take back the last cell and run it again")
    def retry(self, rest: str) -> Result:
        return Result(outcome=self._session.retry(self._view))

    @_command("start a new conversation; Python names stay")
    def new(self, rest: str) -> Result:
        outcome = self._run("", fresh=True)
        return _note("a new conversation; :undo brings the old one back", outcome)

    @_command("start a new conversation with this system turn; alone: show it", "[TEXT]")
    def system(self, rest: str) -> Result:
        if rest:
            return Result(outcome=self._run(f"s += system({code_of(rest)})", fresh=True))
        turns = self._session.state.messages()
        text = next((str(one["content"]) for one in turns if one["role"] == "system"), "no system turn")
        return Result(Text(printable(text)))

    def _path(self, rest: str, name: str) -> Path:
        if not rest:
            raise BadProgram(f":{name} takes a file name")
        return self._session.folder / Path(rest).expanduser()

    @_command("save the conversation and the variables to a file", "FILE", "file")
    def save(self, rest: str) -> Result:
        path = self._path(rest, "save")
        notes = files.save(self._session, path)
        return _note("\n".join([f"saved as {path}", *notes]))

    @_command("continue from a file; runs no code from it", "FILE", "file")
    def load(self, rest: str) -> Result:
        saved = files.load(self._session, self._path(rest, "load"))
        text = f"{len(saved.variables)} variables, {len(saved.cells)} cells; nothing was run"
        if saved.backend != self._session.choice.line:
            text += f"; it was on {saved.backend} (:backend {saved.backend})"
        return _note(text, Outcome(self._session.state))

    @_command("write the session as a program (.py) or a notebook (.ipynb)", "FILE", "file")
    def export(self, rest: str) -> Result:
        path = self._path(rest, "export")
        return _note(f"{files.export(self._session, path)}: {path}")

    @_command("continue with another backend", "[NAME|URL [MODEL]]", "backend")
    def backend(self, rest: str) -> Result:
        flags = rest.split()
        if not flags:
            names = "|".join(backend_names())
            return Result(Text(f"{self._session.choice}; others: :backend {names}|URL [MODEL]"))
        if len(flags) > 2:
            raise BadProgram(":backend takes a name or a server's URL, and a model")
        if flags[0] in NEED_A_MODEL and len(flags) == 1:
            raise BadProgram(f":backend {flags[0]} MODEL: which of its models?")
        return self._move(BackendChoice(*flags))

    @_command("continue with another model", "[MODEL]")
    def model(self, rest: str) -> Result:
        here = self._session.choice
        if not rest:
            return Result(Text(str(here)))
        backend = here.backend if here.backend in NEED_A_MODEL else "engine"
        return self._move(BackendChoice(backend, rest))

    def _move(self, choice: BackendChoice) -> Result:
        self._session.move(choice, self._view)
        return _note(f"on {choice} from here on")

    @_command("set defaults of generations: temperature=0 max_tokens=64", "[NAME=VALUE ...]")
    def set(self, rest: str) -> Result:
        changes: dict[str, Any] = {}
        for pair in rest.split():
            name, equals, value = pair.partition("=")
            if not equals or name not in RUN_OPTIONS - {"backend", "stream", "budget"}:
                raise BadProgram(f":set takes NAME=VALUE, as temperature=0.7; got {pair!r}")
            try:
                changes[name] = json.loads(value) if value not in ("", "None") else None
            except ValueError:
                changes[name] = value
        if changes:
            self._session.set_defaults(changes)
        defaults = ", ".join(f"{name}={value!r}" for name, value in self._session.defaults.items())
        return Result(Text(defaults or "the backend's own defaults; :set temperature=0.7 max_tokens=100"))

    @_command("tokens of each cell: prompt, generated, reused, jumped")
    def usage(self, rest: str) -> Result:
        heads = ["calls", *(key.removesuffix("_tokens") for key in COUNTED)]
        table = _table("cell", *heads, right=heads)
        undone = totals(self._session.records)["calls"]
        for one in self._session.cells:
            if calls := self._session.calls_of(one):
                table.add_row(Text(one_line(one.code, CELL_WIDTH)), *_counts(calls))
                undone -= totals(calls)["calls"]
        table.add_section()
        if undone:
            table.add_row(Text("taken back, or failed", style="dim"), str(undone), *("" for _ in COUNTED))
        table.add_row(Text("in all", style="bold"), *_counts(self._session.records))
        return Result(table)

    @_command("seconds of each cell, to the first token, tokens per second")
    def time(self, rest: str) -> Result:
        heads = ("seconds", "first token", "tokens/s")
        table = _table("cell", *heads, right=heads)
        for one in self._session.cells:
            calls = [call for call in self._session.calls_of(one) if call.kind != "tool"]
            first = next((call.first_token_s for call in calls if call.first_token_s is not None), None)
            first_token = "" if first is None else f"{first:.3f} s"
            table.add_row(
                Text(one_line(one.code, CELL_WIDTH)), f"{one.seconds:.3f} s", first_token, speed(calls)
            )
        return Result(table)

    @_command(
        "the state as a tree with its calls; or a program's nodes, without running it", "[PROGRAM]", "name"
    )
    def trace(self, rest: str) -> Result:
        if not rest:
            return Result(render(self._session.whole()))
        program = self._session.names.get(rest)
        if not isinstance(program, SglFunction):
            programs = (name for name, one in self._session.names.items() if isinstance(one, SglFunction))
            raise BadProgram(f"{rest!r} is not a program; there are: {', '.join(programs) or 'none'}")
        return Result(Text(printable(stoppable(lambda: program.trace().tree()))))

    @_command("this list", "[COMMAND]")
    def help(self, rest: str) -> Result:
        if rest:
            name = rest.lstrip(":/")
            if (command := _named(name)) is None:
                raise BadProgram(f"there is no command :{name}; :help lists them")
            return Result(Text(f":{name} {command.takes}".rstrip() + f"\n  {command.about}"))
        table = _table("command", "")
        for name, one in COMMANDS.items():
            table.add_row(Text(f":{name} {one.takes}".rstrip(), style="cyan"), one.about)
        table.add_section()
        adds = 'adds a turn; assistant(gen("name")) has one generated'
        table.add_row(Text("s += user(...)", style="green"), adds)
        reads = "what was generated; s alone shows all as a tree"
        table.add_row(Text('s["name"]', style="green"), reads)
        return Result(table)

    @_command("leave; so does Ctrl-D")
    def quit(self, rest: str) -> Result:
        return Result(leave=True)


def speed(calls: Iterable[CallRecord]) -> str:
    """Completion tokens per second of call time, calls side by side counted one after the other."""
    counts = [(call.count("completion_tokens"), call.seconds) for call in calls]
    tokens, seconds = sum(one for one, _ in counts), sum(one for _, one in counts)
    return f"{tokens / seconds:.0f}" if tokens and seconds else ""


def footnote(session: Session) -> str:
    """What the last cell cost, in one line; empty if it made no calls."""
    last = session.cells[-1]
    calls = session.calls_of(last)
    if not calls:
        return ""
    sums = totals(calls)
    parts = [f"{last.seconds:.2f} s"]
    if sums["calls"] > 1:
        parts.append(f"{sums['calls']} calls")
    if sums["completion_tokens"]:
        parts.append(f"{sums['completion_tokens']} tokens")
    if sums["calls"] == 1 and (rate := speed(calls)):
        parts.append(f"{rate}/s")
    for name, label in (("cached_tokens", "reused"), ("jumped_tokens", "jumped")):
        if sums[name]:
            parts.append(f"{sums[name]} {label}")
    return " · ".join(parts)


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
    if (command := _named(name)) is None:
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
