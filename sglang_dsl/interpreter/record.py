"""Record: a log of calls and their answers, by content, so that a run can be repeated exactly without the
backend. One SQLite file in a folder, safe for several processes. Knows no backends and no programs.

A call's key is everything its answer depends on: the prompt, the sampling, the constraint. If the answer is
drawn without a seed, also the position of the call: program, item, branch and step.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from sglang_dsl.errors import BadProgram

Mode: TypeAlias = Literal["rw", "ro", "off"]
VERSION = 1
BUSY_S = 10.0

_TABLE = """
CREATE TABLE IF NOT EXISTS calls (
    key TEXT NOT NULL,
    identity TEXT NOT NULL,
    request TEXT NOT NULL,
    reply TEXT NOT NULL,
    PRIMARY KEY (key, identity)
) WITHOUT ROWID
"""


def key_of(request: Mapping[str, Any]) -> str:
    """The name of a call in the log; equal for equal requests, in this version of the format."""
    text = json.dumps([VERSION, request], sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=20).hexdigest()


class CallLog(Protocol):
    """A log of calls: a Record, or one in another process."""

    @property
    def mode(self) -> Mode: ...
    def find(self, key: str, identity: str | None) -> dict[str, Any] | None: ...
    def keep(self, key: str, identity: str, request: Mapping[str, Any], reply: Mapping[str, Any]) -> None: ...


class Record:
    """The log in `folder`, created if it does not exist (mode "rw"). Raises BadProgram for a folder that
    cannot be used."""

    def __init__(self, folder: str | os.PathLike[str], mode: Mode = "rw") -> None:
        if mode not in ("rw", "ro"):
            raise BadProgram(f'a record is "rw" or "ro", got {mode!r}')
        self.path = Path(folder) / "calls.sqlite"
        self.mode: Mode = mode
        self.hits = self.misses = self.written = 0
        self._lock = threading.Lock()
        try:
            if mode == "rw":
                self.path.parent.mkdir(parents=True, exist_ok=True)
                address = f"file:{_quoted(self.path)}"
            else:
                if not self.path.is_file():
                    raise BadProgram(f"there is no record in {os.fspath(folder)!r}; make one with cache='rw'")
                address = f"file:{_quoted(self.path)}?mode=ro"
            self._base = _opened(address, make=mode == "rw")
        except (OSError, sqlite3.Error) as error:
            raise BadProgram(f"the record {os.fspath(folder)!r} cannot be used: {error}") from error

    def find(self, key: str, identity: str | None) -> dict[str, Any] | None:
        """The reply to a call by the backend `identity`. If that is None: by any backend, if only one
        answered."""
        with self._lock:
            if identity is None:
                rows = self._base.execute("SELECT reply FROM calls WHERE key = ? LIMIT 2", (key,)).fetchall()
            else:
                query = "SELECT reply FROM calls WHERE key = ? AND identity = ?"
                rows = self._base.execute(query, (key, identity)).fetchall()
            if len(rows) != 1:
                self.misses += 1
                return None
            self.hits += 1
        reply: dict[str, Any] = json.loads(rows[0][0])
        return reply

    def keep(self, key: str, identity: str, request: Mapping[str, Any], reply: Mapping[str, Any]) -> None:
        """Record an answer. The first one stays."""
        row = (key, identity, *(json.dumps(one, ensure_ascii=False) for one in (request, reply)))
        with self._lock, self._base:
            self._base.execute("INSERT OR IGNORE INTO calls VALUES (?, ?, ?, ?)", row)
            self.written += 1

    def __len__(self) -> int:
        with self._lock:
            return int(self._base.execute("SELECT count(*) FROM calls").fetchone()[0])

    def close(self, *, alone: bool = False) -> None:
        """Close the file. `alone`: no other process writes it, so SQLite's side files are merged into it."""
        with self._lock:
            if alone and self.mode == "rw":
                with contextlib.suppress(sqlite3.OperationalError):  # another process has it open
                    self._base.execute("PRAGMA journal_mode=DELETE")
            self._base.close()


def _opened(address: str, make: bool) -> sqlite3.Connection:
    base = sqlite3.connect(address, timeout=BUSY_S, uri=True, check_same_thread=False)
    if make:
        try:
            _write_ahead(base)
            base.execute("PRAGMA synchronous=NORMAL")
            base.execute(_TABLE)
        except sqlite3.Error:
            base.close()
            raise
    return base


def _write_ahead(base: sqlite3.Connection) -> None:
    # If two processes open a new file at once, SQLite refuses one of them without waiting.
    until = time.monotonic() + BUSY_S
    while True:
        try:
            base.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(0.01)


def _quoted(path: Path) -> str:
    return path.absolute().as_posix().replace("%", "%25").replace("?", "%3f").replace("#", "%23")


class Records:
    """The open logs of this process, one per folder and mode, shared by programs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], Record] = {}
        self._inherited: dict[tuple[str, str], Record] = {}

    def at(self, folder: str | os.PathLike[str], mode: Mode) -> Record:
        name = (os.path.abspath(folder), mode)
        with self._lock:
            if name not in self._open:
                self._open[name] = Record(folder, mode)
            return self._open[name]

    def release(self, folder: str | os.PathLike[str]) -> None:
        """Close the logs of one folder. The record is then one plain file, which can be moved, and read on a
        read-only disk."""
        path = os.path.abspath(folder)
        with self._lock:
            held = [self._open.pop((path, mode), None) for mode in ("rw", "ro")]
        for record in held:
            if record is not None:
                record.close(alone=True)

    def close(self) -> None:
        """Close all logs; they are opened again when used."""
        with self._lock:
            for record in self._open.values():
                record.close()
            self._open.clear()

    def after_fork(self) -> None:
        """In a forked child: SQLite's connections must not be used, nor closed, on both sides."""
        self._lock = threading.Lock()
        self._inherited, self._open = self._open, {}


records = Records()
os.register_at_fork(after_in_child=records.after_fork)
