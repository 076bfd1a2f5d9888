"""A session as a file: JSON that another session continues from, a program, or a notebook."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import tokenize
from pathlib import Path
from typing import Any

import msgspec

import sglang_dsl as sgl
from runtime.protocol.messages import ToolCall
from runtime.protocol.registry import MissingExtra
from sglang_dsl.console.session.cell import names_in
from sglang_dsl.console.session.session import Session
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BadProgram
from sglang_dsl.execution.standing import moment, settled_variable

VERSION = 1
MAX_BYTES = 64 << 20
_TITLE = "A session of sglang-dsl."


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One entry of a transcript, without its links."""

    kind: str
    value: str = ""
    chosen: str | None = None
    hidden: str = ""
    reasoning: str = ""
    part: dict[str, Any] | None = None
    calls: tuple[tuple[str, str, str], ...] = ()

    def transcript(self) -> Transcript:
        """Raises ValueError."""
        if self.kind not in ("text", "open", "close", "media", "calls"):
            raise ValueError(f"an entry is not a {self.kind!r}")
        if self.kind == "media" and (self.part is None or not isinstance(self.part.get("type"), str)):
            raise ValueError("media have a part with a type")
        calls = tuple(ToolCall(name=name, arguments=args, id=id) for id, name, args in self.calls)
        return Transcript(**(msgspec.structs.asdict(self) | {"calls": calls}))


class SavedVariable(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """`raw`: the text that the value was read from."""

    name: str
    value: Any
    raw: str | list[str] | None = None


class SavedSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. `backend`: the arguments of `:backend`."""

    version: int = msgspec.field(name="sglang_dsl_session")
    backend: str
    defaults: dict[str, Any] = msgspec.field(name="words")
    entries: tuple[Entry, ...] = msgspec.field(name="said")
    variables: tuple[SavedVariable, ...]
    cells: tuple[str, ...]


def save(session: Session, path: Path) -> list[str]:
    """Write the session atomically. Returns a note for each thing that is lost. Raises BadProgram."""
    at = session.standing.now()
    variables, entries = [], []
    notes: dict[str, None] = {}
    for name, one in at.variables.items():
        if one.error is not None:
            continue
        value = one.value
        try:
            plain = msgspec.json.decode(msgspec.json.encode(value)) == value
        except (TypeError, ValueError, msgspec.MsgspecError, RecursionError):
            plain = False
        if not plain:
            notes[f"{name} is kept as its text: a {type(value).__name__} is not plain data"] = None
            value = one.raw if one.raw is not None else repr(value)
        variables.append(SavedVariable(name, value, one.raw))
    for entry in at.mark.transcript.entries():
        if entry.kind == "tools":
            notes["tools are not kept: offer them again"] = None
            continue
        part = None if entry.part is None else dict(entry.part)
        calls = tuple((call.id or "", call.name, call.arguments) for call in entry.calls)
        entries.append(
            Entry(entry.kind, entry.value, entry.chosen, entry.hidden, entry.reasoning, part, calls)
        )
    saved = SavedSession(
        VERSION,
        session.choice.line,
        session.defaults,
        tuple(entries),
        tuple(variables),
        tuple(one.code for one in session.counted()),
    )
    write(path, msgspec.json.format(msgspec.json.encode(saved), indent=1))
    return list(notes)


def load(session: Session, path: Path) -> SavedSession:
    """Put the session to the state in a file, without running its code. Raises BadProgram."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadProgram(
                f"{path} has more than {MAX_BYTES >> 20} MiB, more than the limit of a saved session"
            )
        saved = msgspec.json.decode(path.read_bytes(), type=SavedSession)
        if saved.version != VERSION:
            raise BadProgram(f"{path} is of version {saved.version}; this is version {VERSION}")
        transcript = Transcript.EMPTY.extended(entry.transcript() for entry in saved.entries)
    except OSError as error:
        raise BadProgram(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise BadProgram(f"{path} is not a saved session: {error}") from error
    variables = {one.name: settled_variable(one.name, one.value, one.raw) for one in saved.variables}
    session.ready()
    session.adopt(moment(transcript, variables), "\n\n".join(saved.cells))
    return saved


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a file atomically: it has this content, or is unchanged. Raises BadProgram."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise BadProgram(f"{path} cannot be written: {error.strerror}") from error


# -- programs and notebooks ----------------------------------------------------------------------------------


def export(session: Session, path: Path) -> str:
    """Write the counted cells as .py or .ipynb; returns which. Raises BadProgram, MissingExtra."""
    if not session.counted():
        raise BadProgram("nothing to export: no cell was run")
    match path.suffix:
        case ".py":
            write(path, program(session).encode(), 0o666)
            return "a program"
        case ".ipynb":
            write(path, notebook(session).encode(), 0o666)
            return "a notebook"
        case _:
            raise BadProgram(f"{path} must end with .py or .ipynb")


def program(session: Session) -> str:
    """A module: the imports, the cells as one program, and a main block that runs it and shows its state."""
    backend_import, opened = session.choice.source()
    options = "".join(f", {name}={value!r}" for name, value in session.defaults.items())
    body: list[str] = []
    imports: list[str] = []
    used: set[str] = set()
    for one in session.counted():
        code, lifted = _without_imports(one.code)
        imports += lifted
        used |= names_in(one.code)
        if one.stopped:
            body.append("# The answer was stopped before its end.")
        if code.strip():
            body.append(code.strip("\n"))
    if names := ", ".join(sorted(used & set(sgl.__all__))):
        imports.insert(0, f"from sglang_dsl import {names}")
    inner = "\n\n".join(_indented(part) for part in body) or "    pass"
    import_lines = "".join(f"{line}\n" for line in dict.fromkeys(imports))
    return (
        f'"""{_TITLE}"""\n\nimport sglang_dsl as sgl\n{backend_import}\n{import_lines}\n\n'
        f"@sgl.function\ndef session(s):\n{inner}\n\n\n"
        f'if __name__ == "__main__":\n    backend = {opened}\n'
        "    sgl.set_default_backend(backend)\n    try:\n"
        f"        session.run(backend=backend{options}).show()\n    finally:\n        backend.close()\n"
    )


def notebook(session: Session) -> str:
    """A notebook with the cells of the session, run by the extension for IPython. Raises MissingExtra."""
    try:
        import nbformat

        v4: Any = nbformat.v4
    except ImportError as error:
        raise MissingExtra("a notebook needs nbformat: pip install 'sglang-dsl[repl]'") from error
    begin = ["%load_ext sglang_dsl", f"%sgl backend {session.choice.line}"]
    begin += [f"%sgl set {name}={value}" for name, value in session.defaults.items()]
    cells = enumerate(session.counted(), 1)
    content = v4.new_notebook(
        metadata={
            "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
            "language_info": {"name": "python"},
        },
        cells=[
            v4.new_markdown_cell(f"# {_TITLE.rstrip('.')}", id="title"),
            v4.new_code_cell("\n".join(begin), id="begin"),
            *(v4.new_code_cell(f"%%sgl\n{one.code}", id=f"cell-{at}") for at, one in cells),
        ],
    )
    nbformat.validate(content)
    return f"{json.dumps(content, ensure_ascii=False, indent=1)}\n"


def _without_imports(code: str) -> tuple[str, list[str]]:
    """The code without its top-level imports, not all of which a function's body may contain; and these. An
    import that shares a line with another statement stays."""
    imports: list[str] = []
    removed: set[int] = set()
    statements = ast.parse(code).body
    lines_of = [set(range(one.lineno, (one.end_lineno or one.lineno) + 1)) for one in statements]
    for at, one in enumerate(statements):
        others = set().union(*lines_of[:at], *lines_of[at + 1 :])
        if isinstance(one, ast.Import | ast.ImportFrom) and not lines_of[at] & others:
            imports.append(ast.unparse(one))
            removed |= lines_of[at]
    return "\n".join(line for at, line in enumerate(code.split("\n"), 1) if at not in removed), imports


def _indented(code: str) -> str:
    """The code four spaces deeper; lines that begin inside a string literal stay as they are."""
    inside: set[int] = set()
    begun: list[int] = []
    for token in tokenize.generate_tokens(io.StringIO(code + "\n").readline):
        name = tokenize.tok_name[token.exact_type]
        if name == "FSTRING_START":  # from Python 3.12 on, f-strings are several tokens
            begun.append(token.start[0])
        elif name in ("FSTRING_END", "STRING"):
            start = begun.pop() if name == "FSTRING_END" else token.start[0]
            inside.update(range(start + 1, token.end[0] + 1))
    return "\n".join(
        line if at in inside or not line.strip() else f"    {line}"
        for at, line in enumerate(code.split("\n"), 1)
    )
