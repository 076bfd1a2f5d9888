"""Run files: the calls of programs with requests and replies, as one JSON object per line. `sglang-dsl view`
shows them.

    with write_run("run.jsonl"):
        program.run(...)

    {"type": "run", "version": 1, "made_by": ..., "began": ...}     the first line
    {"type": "begin", "call": 3, "run": 0, "program", "kind", "name", "branch", "step", "index", "backend",
     "source", "at": ..., "request": ...}                           a call of a backend begins
    {"type": "end", "call": 3, "seconds", "first_token_s", "replayed", "reply": ...}
    {"type": "error", "call": 3, "seconds", "error": {"type", "message"}}
    {"type": "cache", "at": ..., "tree": ...}                       the backend's prefix cache

Times are seconds, `began` and `at` since 1970. request and reply have the format of records (cache="rw").
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import msgspec

from runtime.protocol.console import version
from sglang_dsl.errors import BadProgram
from sglang_dsl.hooks import CallEvent, subscribed

VERSION = 1
MAX_FILE_BYTES = 256 << 20
MAX_LINE_BYTES = 32 << 20

_ENCODER = msgspec.json.Encoder(enc_hook=str)


class Error(msgspec.Struct):
    type: str
    message: str


class Head(msgspec.Struct, tag="run"):
    version: int
    writer: str = msgspec.field(name="made_by")
    began: float


class Begin(msgspec.Struct, tag="begin"):
    call: int
    run: int
    program: str
    kind: str
    name: str | None
    branch: tuple[int, ...]
    step: int
    at: float
    index: int | None = None
    backend: str | None = None
    source: str | None = None
    request: dict[str, Any] = {}


class End(msgspec.Struct, tag="end"):
    call: int
    seconds: float
    first_token_s: float | None = None
    replayed: bool = False
    reply: dict[str, Any] = {}


class Failed(msgspec.Struct, tag="error"):
    call: int
    seconds: float
    error: Error


class Cache(msgspec.Struct, tag="cache"):
    at: float
    tree: dict[str, Any]


Line: TypeAlias = Head | Begin | End | Failed | Cache
_DECODER = msgspec.json.Decoder(Line)


class RunWriter:
    """A hook that writes the events of calls. `error`: the failure that ended the writing, if any."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._lock = file, threading.Lock()
        self.error: OSError | None = None
        # Later times are by the monotonic clock, so that setting the clock does not reorder events.
        self._began, self._zero = time.time(), time.monotonic()
        self._write(Head(VERSION, f"sglang-dsl {version()}", self._began))

    def __call__(self, event: CallEvent) -> None:
        self._write(_line(event, self._now()))

    def cache(self, tree: Mapping[str, Any]) -> None:
        self._write(Cache(self._now(), dict(tree)))

    def _now(self) -> float:
        return self._began + time.monotonic() - self._zero

    def _write(self, line: Line) -> None:
        try:
            data = _ENCODER.encode(line) + b"\n"
        except (TypeError, ValueError, OverflowError):  # half a surrogate pair, an integer beyond 64 bits
            plain = json.dumps(msgspec.to_builtins(line, enc_hook=str), ensure_ascii=False, default=str)
            data = plain.encode("utf-8", "replace") + b"\n"
        with self._lock:
            if self.error is not None:
                return
            try:
                while data:  # a disk that is almost full takes less
                    data = data[self._file.write(data) :]
            except OSError as error:
                self.error = error


def _line(event: CallEvent, now: float) -> Line:
    match event.phase:
        case "begin":
            source = None if event.source is None else f"{event.source.file}:{event.source.line}"
            request = {} if event.request is None else event.request()
            return Begin(
                call=event.number, run=event.run, program=event.program, kind=event.kind, name=event.name,
                branch=event.branch, step=event.step, at=now, index=event.index, backend=event.backend,
                source=source, request=request,
            )  # fmt: skip
        case "end":
            reply = {} if event.reply is None else event.reply()
            return End(event.number, event.seconds, event.first_token_s, event.replayed, reply)
        case "error":
            error = Error(type(event.error).__name__, str(event.error))
            return Failed(event.number, event.seconds, error)


@contextmanager
def write_run(path: str | os.PathLike[str]) -> Iterator[RunWriter]:
    """Write all calls that programs of this process make within the block to a new file, for `sglang-dsl
    view`, which can also follow it while it grows. The file contains prompts and replies.

    Raises BadProgram if the file cannot be written; if that happens later, at the end of the block.
    """
    try:
        file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed below; unbuffered for `view --live`
    except OSError as error:
        raise BadProgram(f"{os.fspath(path)} cannot be written: {error.strerror or error}") from error
    with file:
        writer = RunWriter(file)
        with subscribed(writer):
            yield writer
        if writer.error is not None:
            reason = writer.error.strerror or writer.error
            raise BadProgram(f"{os.fspath(path)} is incomplete: {reason}") from writer.error


def read_run(path: str | os.PathLike[str], *, growing: bool = False) -> list[Line]:
    """The complete lines of a run file. `growing`: it may still be empty. Raises BadProgram."""
    name = os.fspath(path)
    try:
        size = Path(path).stat().st_size
        if size > MAX_FILE_BYTES:
            raise BadProgram(f"{name} has {size} bytes; a run file has at most {MAX_FILE_BYTES}")
        data = Path(path).read_bytes()
    except OSError as error:
        raise BadProgram(f"{name} cannot be read: {error.strerror or error}") from error
    whole, _, _ = data.rpartition(b"\n")
    lines = [_read(name, number, line) for number, line in enumerate(whole.split(b"\n"), 1)] if whole else []
    if not lines and not growing:
        raise BadProgram(f"{name} is empty" if not data else f"{name}, line 1: it is not a run file")
    if lines:
        _check_head(name, lines[0])
    return lines


def _read(name: str, number: int, data: bytes) -> Line:
    if len(data) > MAX_LINE_BYTES:
        raise BadProgram(f"{name}, line {number}: has {len(data)} bytes; at most {MAX_LINE_BYTES}")
    try:
        return _DECODER.decode(data)  # type: ignore[no-any-return]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        what = "it is not a run file" if number == 1 else "is no line of a run file"
        raise BadProgram(f"{name}, line {number}: {what} ({error})") from error


def _check_head(name: str, head: Line) -> None:
    if not isinstance(head, Head):
        raise BadProgram(f'{name}, line 1: it is not a run file: the first line has no "type": "run"')
    if head.version != VERSION:
        raise BadProgram(
            f"{name}, line 1: its format has version {head.version}, not {VERSION}; "
            "use the release that wrote it"
        )
    if not math.isfinite(head.began):
        raise BadProgram(f"{name}, line 1: `began` is not a time")
