"""`chat` in a real terminal: a pseudo-terminal whose keys a test presses."""

from __future__ import annotations

import stat
from pathlib import Path

from tests.process.conftest import Served
from tests.process.patience import held
from tests.process.terminal import CTRL_C, CTRL_D, LEFT, UP, terminal

LONG = ["--regex", "([a-z]{9} ){600}", "--max-tokens", "1900", "--temperature", "0"]


def test_a_session_outlives_stopped_answers_refused_messages_and_empty_lines(
    tmp_path: Path, shared_server: Served
) -> None:
    with terminal(tmp_path, "chat", "--backend", shared_server.url, *LONG) as seen:
        seen.shows("Type a message")
        seen.prompt()
        seen.press("\r  \r")
        seen.prompt()
        seen.press("tell me all\r")
        seen.shows(r"^([a-z]{9} ){5}")
        with held(shared_server.url):
            seen.press(CTRL_C)
            seen.shows(r"\[stopped\]")
        seen.prompt()
        seen.runs("/messages", "tell me all", '"role": "assistant"')
        seen.runs("/undo", "taken back: .*tell me all")  # however long it was, the next one has room
        seen.press("word " * 2500 + "\r")
        seen.shows("refused: .*tokens")
        seen.prompt()
        seen.press("once more\r")
        seen.shows(r"^([a-z]{9} ){5}")
        with held(shared_server.url):
            seen.press(CTRL_C)
            seen.shows(r"\[stopped\]")
        seen.prompt()
        seen.runs("/undo", "taken back: .*once more")
        seen.runs("/new", "a new conversation")
        seen.runs("/messages", r"^\[\]")
        seen.press("/quit\r")
        assert seen.ends() == 0
    assert "Traceback" not in seen.text


def test_lines_can_be_edited_and_are_remembered_by_their_user_alone(tmp_path: Path) -> None:
    file = tmp_path / "state" / "sglang-dsl" / "chat_history"
    for again in (False, True):  # the second time, of the first session
        with terminal(tmp_path, "chat", "--backend", "mock") as seen:
            seen.shows("Type a message")
            seen.prompt()
            if again:
                seen.runs(UP + "!", r"hallo!$")
            else:
                seen.runs("halo" + LEFT + "l", r"hallo$")  # an l before the o
            seen.press(CTRL_D)
            assert seen.ends() == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [line for line in file.read_text().splitlines() if line.startswith("+")] == ["+hallo", "+hallo!"]


def test_no_place_for_a_history_is_no_matter(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    with terminal(tmp_path, "chat", "--backend", "mock") as seen:
        seen.shows("Type a message")
        seen.runs("hello", r"^[a-z]+ [a-z]+")
        seen.press("/quit\r")
        assert seen.ends() == 0
    assert "Traceback" not in seen.text
