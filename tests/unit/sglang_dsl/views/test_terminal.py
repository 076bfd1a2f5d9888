"""What people see in the terminal: a finished state, and the command."""

from __future__ import annotations

import io
import json
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import sglang_dsl as sgl
from sglang_dsl import MockBackend, Program, gen, select
from sglang_dsl.__main__ import main
from sglang_dsl.console.backend_flag import BackendChoice, Opening
from sglang_dsl.console.front.screen import Screen
from sglang_dsl.console.front.terminal import Loop
from sglang_dsl.console.session import commands
from sglang_dsl.console.session.session import Session
from sglang_dsl.views.terminal import constraint_report, render, show

SOURCE = """
from sglang_dsl import assistant, function, gen, user

@function
def ask(s, question, count=1):
    s += user(question)
    for i in range(count):
        s += assistant(gen(f"answer{i}"))

@function
def broken(s):
    s += gen("x", regex="(?=a)b")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "programs.py"
    path.write_text(SOURCE)
    return path


def printed(state: sgl.ProgramState) -> str:
    out = io.StringIO()
    show(state.core.snapshot(None), Console(file=out, width=100, no_color=True))
    return out.getvalue()


def test_a_state_shows_turns_generations_forks_and_usage() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "loose text "
        s += sgl.user("the question")
        s += sgl.assistant(gen("answer"))
        forks = s.fork(2)
        forks += lambda i: f"side {i}: " + gen("x")
        forks.join()
        s += sgl.user("more") + select("c", ["yes", "no"])

    state = program.run(
        backend=MockBackend(["the answer", "left", "right"], scores={"yes": -1.0, "no": -2.0})
    )
    text = printed(state)
    order = ["loose text", "user", "the question", "assistant", "the answer ⟵ answer", "fork, 2 branches"]
    order += ["side 0: left ⟵ x", "branch 1", "side 1: right", "more", "yes ⟵ c", "total"]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    total = next(line for line in text.splitlines() if "total" in line)
    assert str(state.usage()["prompt_tokens"]) in total
    assert any("1" in line and "x" in line for line in text.splitlines())


def test_a_failed_state_shows_what_came_before_and_the_error() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "before " + gen("x")

    text = printed(program.run(backend=MockBackend(errors={0: OSError("cut off")})))
    assert "before" in text
    assert "BackendError" in text
    assert "cut off" in text


def test_a_traced_state_can_be_rendered() -> None:
    seen: list[Any] = []
    sgl.function(lambda s: seen.append(render(s.__iadd__("a" + gen("x")).snapshot()))).trace()
    assert seen


def test_run_shows_the_state(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"{file}:ask", "question=What?", "count=2", "--backend", "mock"]) == 0
    out = capsys.readouterr().out
    assert "What?" in out
    assert "answer1" in out
    assert (
        main(["run", f"{file}:ask", "question=Twelve", "--backend", "mock", "--stream", "--max-tokens", "1"])
        == 0
    )
    assert capsys.readouterr().out.startswith("USER: ")


def test_run_tells_failures(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", f"{file}:broken", "--backend", "mock"]) == 1
    assert "programs.py:12" in capsys.readouterr().err
    for wrong, said in (
        ([f"{file}:nothing"], "it has: ask, broken"),
        (["nowhere.py:x"], "does not exist"),
        ([f"{file}:ask", "question"], "NAME=VALUE"),
    ):
        assert main(["run", *wrong, "--backend", "mock"]) == 2
        assert said in capsys.readouterr().err
    assert main(["run", f"{file}:ask", "--backend", "mock", "--model", "x"]) == 2
    for unknown in ("endpoint", "nobody", "localhost:3"):
        assert main(["run", f"{file}:ask", "question=x", "--backend", unknown]) == 2
        assert "or a server's URL" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_told(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang_dsl.backends.common.transport.FIRST_PAUSE_S", 0.001)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["run", f"{file}:ask", "question=What?", "count=1", "--backend", url]) == 1
    assert "no connection" in capsys.readouterr().err


def test_trace_prints_the_tree_or_json(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", f"{file}:ask", "count=2"]) == 0
    assert "Gen(name='answer1')  # programs.py:8" in capsys.readouterr().out
    assert main(["trace", f"{file}:ask", "--json"]) == 0
    assert Program.from_dict(json.loads(capsys.readouterr().out)).name == "ask"


def converse(
    backend: MockBackend,
    ask: Callable[[str], str],
    out: io.StringIO,
    *,
    system: str | None = None,
    **form: Any,
) -> int:
    """A chat that stays on `backend`; its exit code."""
    session = Session(Opening.of(BackendChoice("mock"), backend))
    if system is not None:
        commands.call(session, f"system {system}")
    screen = Screen(Console(file=out), chat=True)
    return Loop(session, screen, chat=True, stays=False, form=form).run(lambda: ask("> "))


def test_a_conversation_goes_on_until_the_user_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    said = iter(["hello", "and?", "/quit"])
    mock = MockBackend(["Hi there.", "Nothing."], split=3)
    out = io.StringIO()
    assert converse(mock, lambda prompt: next(said), out, system="Be nice.") == 0
    assert "Hi there.\nNothing.\n" in out.getvalue()
    assert [m.content for m in mock.calls[1].prompt.messages] == [
        "Be nice.",
        "hello",
        "Hi there.",
        "and?",
        "",
    ]
    failing = MockBackend(errors={0: OSError("down")})
    assert converse(failing, lambda prompt: "x", out) == 1
    assert "down" in capsys.readouterr().err

    def end(prompt: str) -> str:
        raise EOFError

    assert converse(mock, end, out) == 0


def test_a_refused_message_is_forgotten_and_an_empty_line_is_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    too_long = sgl.BackendError("the prompt has 9 tokens", status=400, hint="shorten it")
    mock = MockBackend(["one", "two", "three"], errors={1: too_long})
    asked = iter(["a", "", "  ", "b", "c", "/new", "d", "/exit"])
    out = io.StringIO()
    assert converse(mock, lambda prompt: next(asked), out) == 0
    assert capsys.readouterr().err == "\nrefused: the prompt has 9 tokens\n  shorten it\n"
    prompts = [[m.content for m in call.prompt.messages] for call in mock.calls]
    assert prompts == [["a", ""], ["a", "one", "b", ""], ["a", "one", "c", ""], ["d", ""]]


def test_the_picture_says_who_kept_what() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "free " + gen("a") + " bound " + gen("b")

    told = {"backend": "llguidance", "exact": False, "checked": ["not at #/x"], "ignored": [], "rollbacks": 2}
    state = program.run(backend=MockBackend(["one", "two"]))
    state.sync()
    assert "constraint" not in printed(state)
    core: Any = state.core
    core.run.ledger.records()[1].meta["grammar"] = told
    assert "constraint" in printed(state)
    assert (
        constraint_report({"grammar": told})
        == "llguidance; checked by a validator: not at #/x; 2 steps taken back"
    )


def test_chat_keeps_answers_to_a_form(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n\n"))
    assert main(["chat", "--backend", "mock", "--regex", "[0-9]{3}x"]) == 0
    # No banner and no prompt: in a pipe, standard output holds answers alone.
    assert re.fullmatch(r"[0-9]{3}x\n", capsys.readouterr().out)
    (tmp_path / "schema.json").write_text('{"type": }')
    assert main(["chat", "--backend", "mock", "--json-schema", f"@{tmp_path}/schema.json"]) == 2
    assert "line 1 column 10" in capsys.readouterr().err
    assert main(["chat", "--backend", "mock", "--ebnf", "@/no/such/file"]) == 2
    with pytest.raises(SystemExit):
        main(["chat", "--regex", "a", "--ebnf", "b"])


def test_a_constraint_that_cannot_be_kept_is_told_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    asked = iter(["hello"])
    code = converse(MockBackend(), lambda _: next(asked), io.StringIO(), ebnf='root ::= "a"')
    assert code == 1
    told = capsys.readouterr().err
    assert "Unsupported: the mock backend cannot make up text for ebnf\n  script the reply" in told
    assert "program" not in told


MARKUP = "[/INST] list[int] [bold]x[/bold] :smile: [link=a]"


def test_text_of_models_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor are names, roles and errors."""
    sgl.utils.print_highlight(MARKUP)
    assert MARKUP in capsys.readouterr().out

    def program(s: Any) -> None:
        s += sgl.role("[/x]", MARKUP) + gen("[/name]")
        s.fork(1).join()
        raise_in = gen("[red]", regex="[/]")
        s += raise_in

    program.__qualname__ = "[/program]"
    backend = MockBackend([MARKUP, MARKUP])
    out = io.StringIO()
    show(sgl.function(program).run(backend=backend).core.snapshot(None), Console(file=out, width=400))
    for said in (MARKUP, "[/x]", "[/name]", "[/program]"):
        assert said in out.getvalue()
    assert "does not match" in out.getvalue()
