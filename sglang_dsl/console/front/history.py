"""Lines of earlier sessions: a file in the user's state folder that nobody else can read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

MOST = 1000


def state_file(name: str) -> Path | None:
    """A file of this user, with nobody else's eyes on it; None where it cannot be written."""
    base = os.environ.get("XDG_STATE_HOME", "")
    try:
        folder = (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "sglang-dsl"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / name
        file = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            os.fchmod(file, 0o600)
        finally:
            os.close(file)
    except (OSError, RuntimeError):  # no home
        return None
    return path


def read(path: Path) -> list[str]:
    """What was typed, oldest first. A file that cannot be read has nothing in it."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines[-MOST:]:
        try:
            said = json.loads(line)
        except ValueError:
            said = line
        found.append(said if isinstance(said, str) else line)
    if len(lines) > 2 * MOST:
        write(path, found, "w")
    return found


def write(path: Path, lines: Iterable[str], mode: str = "a") -> None:
    """Add lines, each a text of one or more lines. Where that fails they are of this session only."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    except (OSError, UnicodeError):
        return
