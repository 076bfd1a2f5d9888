"""A session as a file: what was said, the variables, and the cells' text, as JSON. Reading one runs
nothing."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import msgspec

from sglang_dsl.console.session.session import Session
from sglang_dsl.conversation.transcript import Transcript
from sglang_dsl.errors import BadProgram
from sglang_dsl.execution.standing import moment, settled_variable

VERSION = 1
MOST_BYTES = 64 << 20


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One entry of a transcript, by itself."""

    kind: str
    value: str = ""
    chosen: str | None = None
    hidden: str = ""
    reasoning: str = ""
    part: dict[str, Any] | None = None
    calls: tuple[tuple[str, str, str], ...] = ()


class SavedVariable(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """raw: the text that the value was read from."""

    name: str
    value: Any
    raw: str | list[str] | None = None


class Saved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file. backend: what `:backend` takes."""

    sglang_dsl_session: int
    backend: str
    words: dict[str, Any]
    said: tuple[Entry, ...]
    variables: tuple[SavedVariable, ...]
    cells: tuple[str, ...]


def save(session: Session, path: Path) -> list[str]:
    """Write it, all at once and for this user alone. What could not be kept as it is, in words. Raises
    BadProgram."""
    at = session.standing.now()
    kept, lost = [], []
    for name, one in at.variables.items():
        if one.error is not None:
            continue
        value = one.value
        try:
            plain = msgspec.json.decode(msgspec.json.encode(value)) == value
        except (TypeError, ValueError, msgspec.MsgspecError, RecursionError):
            plain = False
        if not plain:
            text = one.raw if one.raw is not None else repr(value)
            lost.append(f"{name} is kept as its text: a {type(value).__name__} is not plain data")
            value = text
        kept.append(SavedVariable(name, value, one.raw))
    entries = []
    for entry in at.mark.transcript.entries():
        if entry.kind == "tools":
            lost.append("tools are not kept: offer them again")
            continue
        part = None if entry.part is None else dict(entry.part)
        calls = tuple((call.id or "", call.name, call.arguments) for call in entry.calls)
        entries.append(
            Entry(entry.kind, entry.value, entry.chosen, entry.hidden, entry.reasoning, part, calls)
        )
    made = Saved(
        VERSION,
        session.place.line,
        session.words,
        tuple(entries),
        tuple(kept),
        tuple(one.code for one in session.counted()),
    )
    write(path, msgspec.json.format(msgspec.json.encode(made), indent=1))
    return list(dict.fromkeys(lost))


def load(session: Session, path: Path) -> Saved:
    """Put the session to what a file says; it goes on with its own backend. The file. Raises BadProgram."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise BadProgram(
                f"{path} has more than {MOST_BYTES >> 20} MiB, more than the limit of a saved session"
            )
        found = msgspec.json.decode(path.read_bytes(), type=Saved)
        if found.sglang_dsl_session != VERSION:
            raise BadProgram(f"{path} is of version {found.sglang_dsl_session}; this is version {VERSION}")
        said = Transcript.EMPTY.extended(map(_entry, found.said))
    except OSError as error:
        raise BadProgram(f"{path} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise BadProgram(f"{path} is not a saved session: {error}") from error
    variables = {one.name: settled_variable(one.name, one.value, one.raw) for one in found.variables}
    session.ready()
    session.adopt(moment(said, variables), "\n\n".join(found.cells))
    return found


def _entry(entry: Entry) -> Transcript:
    """Raises ValueError."""
    if entry.kind not in ("text", "open", "close", "media", "calls"):
        raise ValueError(f"an entry is not a {entry.kind!r}")
    if entry.kind == "media" and (entry.part is None or not isinstance(entry.part.get("type"), str)):
        raise ValueError("media have a part with a type")
    calls = tuple(_call(*call) for call in entry.calls)
    return Transcript(
        kind=entry.kind,  # type: ignore[arg-type]
        value=entry.value,
        chosen=entry.chosen,
        hidden=entry.hidden,
        reasoning=entry.reasoning,
        part=entry.part,
        calls=calls,
    )


def _call(id: str, name: str, arguments: str) -> Any:
    from runtime.protocol.messages import ToolCall

    return ToolCall(name=name, arguments=arguments, id=id)


def write(path: Path, content: bytes, mode: int = 0o600) -> None:
    """A file with this content, or the one that was there before. Raises BadProgram."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise BadProgram(f"{path} cannot be written: {error.strerror}") from error
