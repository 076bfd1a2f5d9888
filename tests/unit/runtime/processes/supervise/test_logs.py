"""Logging: lines that cannot be written cost the line; keys are in none."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.config.serving.server import ServerConfig
from runtime.processes.supervise import logs

log = logging.getLogger("runtime.test")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level, raising = list(root.handlers), root.level, logging.raiseExceptions
    quiet = {name: logging.getLogger(name).level for name in logs.QUIET}
    yield
    for handler in list(root.handlers):
        if handler not in handlers:
            handler.close()
            stream = getattr(handler, "stream", None)
            if stream is not None and stream is not sys.stderr:
                with contextlib.suppress(OSError):
                    stream.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.raiseExceptions = raising
    for name, before in quiet.items():
        logging.getLogger(name).setLevel(before)


def test_lines_go_to_stderr_and_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    file = tmp_path / "x.log"
    logs.set_up(ServerConfig(log_file=str(file)), "worker-7")
    log.info("hello")
    log.debug("not asked for")
    for written in (screen.getvalue(), file.read_text()):
        # Other tests' threads may have something to say at any time.
        (line,) = [one for one in written.splitlines() if "hello" in one]
        assert line.endswith("INFO    worker-7: hello")
        assert "not asked" not in written


def test_the_key_is_in_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    logs.set_up(ServerConfig(api_key="k3y"), "x")
    log.info("the key is %s, %d", "k3y", 5)
    log.info("k3y")
    log.info("nothing")
    assert "k3y" not in screen.getvalue()
    assert "the key is ***, 5" in screen.getvalue()


def test_a_full_disk_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    logs.set_up(ServerConfig(log_file="/dev/full"), "x")
    log.info("one")
    log.info("two")
    assert "one" in screen.getvalue()
    assert "two" in screen.getvalue()


def test_a_file_that_cannot_be_opened_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    logs.set_up(ServerConfig(log_file=str(tmp_path / "no" / "x.log")), "x")
    assert "x.log cannot be opened" in screen.getvalue()


def test_a_closed_terminal_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    logs.set_up(ServerConfig(), "x")
    screen.close()
    log.info("nobody reads this")
