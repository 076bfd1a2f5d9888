"""`chat` in a real terminal: a pseudo-terminal whose keys a test presses."""

from __future__ import annotations

import contextlib
import os
import re
import select
import stat
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.patience import PATIENCE_S

pytestmark = pytest.mark.timeout(400)

ROOT = Path(__file__).resolve().parents[2]
# Makes the terminal the child's own, so that Ctrl-C is a signal to it, and lets the signal do what it does,
# as a shell would: a suite that runs in the background may have it ignored.
ADOPT = (
    "import fcntl, os, signal, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
CTRL_C, CTRL_D, UP, LEFT = "\x03", "\x04", "\x1b[A", "\x1b[D"
# More than a terminal holds that nobody reads (4,096 characters): an answer waits for its reader, so that
# Ctrl-C always finds it under way.
WORDS = 600
LONG = ["--regex", f"([a-z]{{9}} ){{{WORDS}}}", "--max-tokens", "1900", "--temperature", "0"]
FEW = 64
LOCAL_FLAGS = 3  # their place among a terminal's settings


class Terminal:
    """`seen`: what was shown and not yet waited for."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master = process, master
        self.seen = self.all = ""

    def press(self, keys: str) -> None:
        data = keys.encode()
        while data:
            self._read(0.0)  # what is echoed must be read, or nothing more is taken
            _, ready, _ = select.select([], [self._master], [], 1.0)
            if ready:
                data = data[os.write(self._master, data[:512]) :]

    def shows(self, pattern: str, most: int = 1 << 16) -> str:
        """Wait until it does; what was shown up to there. `most`: bytes read at a time."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.seen[-500:]!r}"
            assert self._read(1.0, most), f"it ended after {self.seen[-500:]!r}"
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def ends(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while self._read(1.0):
            assert time.monotonic() < deadline, self.seen[-500:]
        return self.process.wait(PATIENCE_S)

    def interrupt(self) -> None:
        """Ctrl-C, and nothing is read before it."""
        os.write(self._master, CTRL_C.encode())

    def _read(self, seconds: float, most: int = 1 << 16) -> bool:
        """False when the other side has closed it."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            piece = os.read(self._master, most)
        except OSError:
            return False
        text = re.sub(r"\x1b\[\?2004[hl]", "", piece.decode(errors="replace"))
        self.seen += text
        self.all += text
        return bool(piece)


@contextlib.contextmanager
def chat(home: Path, *words: str) -> Iterator[Terminal]:
    master, slave = os.openpty()
    # Else Ctrl-C also throws away what was written and not yet read, the answer to it included.
    settings = termios.tcgetattr(slave)
    settings[LOCAL_FLAGS] |= termios.NOFLSH
    termios.tcsetattr(slave, termios.TCSANOW, settings)
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm", "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"), "INPUTRC": "/dev/null",
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", ADOPT, "-m", "sglang_dsl", "chat", *words],
        stdin=slave, stdout=slave, stderr=slave, env=environment,
    ) as process:  # fmt: skip
        os.close(slave)
        terminal = Terminal(process, master)
        try:
            terminal.shows(r"Type a message[^\n]*\n")
            terminal.shows("> ")
            yield terminal
        finally:
            process.kill()
            os.close(master)


def test_a_session_outlives_stopped_answers_refused_messages_and_empty_lines(tmp_path: Path) -> None:
    with chat(tmp_path, *LONG) as terminal:
        terminal.press("\r  \r")
        terminal.shows(r"\n> +\r\n> ")
        terminal.press("tell me all\r")
        terminal.shows(r"\n([a-z]+ ){5}", FEW)
        terminal.interrupt()
        shown = terminal.shows(r"\[stopped\]\r\n")
        assert shown.count(" ") < WORDS - 10
        terminal.shows("> ")
        terminal.press("word " * 2500 + "\r")
        terminal.shows("refused: .*tokens")
        terminal.shows("> ")
        terminal.press("once more\r")
        terminal.shows(r"\n([a-z]+ ){5}", FEW)
        terminal.interrupt()
        terminal.shows(r"\[stopped\]\r\n> ")
        terminal.press("/new\r")
        terminal.shows("> ")
        terminal.press("/quit\r")
        assert terminal.ends() == 0
    assert "Traceback" not in terminal.all


def test_lines_can_be_edited_and_are_remembered_by_their_user_alone(tmp_path: Path) -> None:
    for _ in range(2):  # the second time, of the first session
        with chat(tmp_path, "--backend", "mock") as terminal:
            if (tmp_path / "state" / "sglang-dsl" / "chat_history").stat().st_size:
                terminal.press(UP + "!\r")
                assert "hallo!" in terminal.shows("\n> ")
            else:
                terminal.press("halo" + LEFT + "l\r")  # an l before the o
                assert re.search(r"hal.*o", terminal.shows("\n> "))
            terminal.press(CTRL_D)
            assert terminal.ends() == 0
    file = tmp_path / "state" / "sglang-dsl" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().splitlines() == ["hallo", "hallo!"]


def test_no_place_for_a_history_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    with chat(tmp_path, "--backend", "mock") as terminal:
        terminal.press("hello\r")
        terminal.shows("\n> ")
        terminal.press("/quit\r")
        assert terminal.ends() == 0
    assert "Traceback" not in terminal.all
