"""A command in a terminal: a pseudo-terminal whose keys a test presses, and its screen (pyte)."""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyte

from tests.process.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
# Makes the terminal the child's own, so that Ctrl-C is a signal to it, and lets the signal do what it does,
# as a shell would: a suite that runs in the background may have it ignored.
ADOPT = (
    "import fcntl, os, signal, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
CTRL_C, CTRL_D, UP, LEFT, TAB, ENTER = "\x03", "\x04", "\x1b[A", "\x1b[D", "\t", "\r"
WIDE, HIGH = 100, 40
# What the engine compiles on a machine once is found again, though the home is another.
CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
ASKS_WHERE = b"\x1b[6n"


class Terminal:
    """`text`: all lines by now, those that were scrolled away included."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self.screen = pyte.HistoryScreen(WIDE, HIGH, history=5000, ratio=0.5)
        self._stream = pyte.ByteStream(self.screen)
        self._passed = 0

    @property
    def text(self) -> str:
        gone = ("".join(row[at].data for at in range(WIDE)) for row in self.screen.history.top)
        return "\n".join(line.rstrip() for line in (*gone, *self.screen.display)).rstrip()

    def colour(self, said: str) -> str:
        """Of the first letter of the last line on the screen that has this text."""
        for row in range(HIGH - 1, -1, -1):
            if (at := self.screen.display[row].find(said)) >= 0:
                return str(self.screen.buffer[row][at].fg)
        raise AssertionError(f"no {said!r} on the screen:\n{self.text}")

    def press(self, keys: str) -> None:
        data = keys.encode()
        while data:
            self._read(0.0)  # what is echoed must be read, or nothing more is taken
            _, ready, _ = select.select([], [self._master], [], 1.0)
            if ready:
                data = data[os.write(self._master, data[:512]) :]

    def shows(self, pattern: str) -> re.Match[str]:
        """Wait until it stands behind what was waited for before."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := re.compile(pattern, re.MULTILINE).search(self.text, self._passed)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} behind {self.text[self._passed :]!r}"
            assert self._read(1.0), f"it ended: {self.text!r}"
        self._passed = found.end()
        return found

    def runs(self, line: str, *patterns: str) -> None:
        """Type a line, and wait for what it shows and the next prompt."""
        self.press(line + ENTER)
        for pattern in patterns:
            self.shows(pattern)
        self.prompt()

    def prompt(self) -> None:
        """Wait for an empty prompt."""
        self.shows(r"^[❯›](?=\s*\Z|\s*\n\s* \S+ (●|○))")

    def ends(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while self._read(1.0):
            assert time.monotonic() < deadline, self.text
        return self.process.wait(PATIENCE_S)

    def _read(self, seconds: float) -> bool:
        """False when the other side has closed it."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            piece = os.read(self._master, 1 << 16)
        except OSError:
            return False
        self._stream.feed(piece)
        if ASKS_WHERE in piece:
            where = f"\x1b[{self.screen.cursor.y + 1};{self.screen.cursor.x + 1}R"
            os.write(self._master, where.encode())
        return bool(piece)


@contextlib.contextmanager
def terminal(home: Path, *words: str, environment: dict[str, str] | None = None) -> Iterator[Terminal]:
    """`sglang-dsl WORDS` in a terminal; `home`: its user's folder, and where it runs."""
    master, slave = os.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", HIGH, WIDE, 0, 0))
    given = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color",
        "HOME": str(home), "XDG_STATE_HOME": str(home / "state"),
        "XDG_CACHE_HOME": CACHE, **(environment or {}),
    }  # fmt: skip
    given.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-c", ADOPT, "-P", "-m", "sglang_dsl", *words],
        stdin=slave, stdout=slave, stderr=slave, env=given, cwd=home,
    ) as process:  # fmt: skip
        os.close(slave)
        made = Terminal(process, master)
        try:
            yield made
        finally:
            process.kill()
            os.close(master)
