"""Sessions without a terminal: cells, what can be taken back, files, exports, completion, what a command
says."""

from __future__ import annotations

import ast
import io
import json
import re
import signal
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from rich.console import Console

import sglang_dsl as sgl
from sglang_dsl import MockBackend
from sglang_dsl.backends.base import Call
from sglang_dsl.console.backend_flag import BackendChoice, Opening
from sglang_dsl.console.front.prompt import complete
from sglang_dsl.console.front.screen import Screen
from sglang_dsl.console.session import commands
from sglang_dsl.console.session.session import Session
from sglang_dsl.errors import BadProgram

ASK = 's += user("Q") + assistant(gen("x"))'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def mock() -> MockBackend:
    return MockBackend(["one", "two", "three", "four", "five", "six"])


@pytest.fixture
def session(mock: MockBackend, folder: Path) -> Iterator[Session]:
    made = Session(Opening.of(BackendChoice("mock"), mock), folder=folder)
    yield made
    made.close()
    assert sgl.global_config.default_backend is None


def said(session: Session) -> list[str]:
    return [str(turn["content"]) for turn in session.state.messages()]


def told(session: Session, line: str) -> str:
    """What a command shows."""
    console = Console(file=io.StringIO(), width=200)
    made = commands.call(session, line)
    console.print(made.show)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_cells_share_names_and_a_state(session: Session) -> None:
    assert session.run("import math\nn = 2").value is None
    assert session.run("math.sqrt(n * 2)").value == 2.0
    assert session.run(ASK).error is None
    assert session.run('s["x"]').value == "one"
    made = session.run("@function\ndef p(s, q):\n    s += user(q) + assistant(gen('y'))\n\np('?')['y']")
    assert made.value == "two"  # on the session's backend
    assert session.run("s").value is session.state
    session.run("s = 3")
    assert session.names["s"] is session.state


def test_a_cell_that_fails_leaves_the_state_as_it_was(session: Session, mock: MockBackend) -> None:
    session.run(ASK)
    mock.errors = {1: sgl.BackendError("down")}
    failed = session.run('s += user("R") + assistant(gen("y"))')
    assert isinstance(failed.error, sgl.BackendError)
    assert failed.error.source is not None
    assert str(failed.error.source).startswith("<cell 2>:1")
    raised = session.run('s += user("R") + assistant(gen("y"))\n1 / 0')
    assert isinstance(raised.error, ZeroDivisionError)
    assert isinstance(session.run("s +=").error, SyntaxError)
    assert said(session) == ["Q", "one"]
    assert "y" not in session.state
    assert session.run('s += user("R") + assistant(gen("y"))\ns["y"]').value is not None


def test_undo_and_retry_go_by_what_changed_the_state(session: Session) -> None:
    session.run(ASK)
    session.run('s += user("R") + assistant(gen("x"))')
    session.run('s["x"]')
    assert session.retry().error is None
    assert said(session) == ["Q", "one", "R", "three"]
    [taken] = session.undo()
    assert taken.code.startswith('s += user("R")')
    assert session.state["x"] == "one"
    session.undo()
    assert said(session) == []
    with pytest.raises(BadProgram, match="nothing to take back"):
        session.undo()
    assert session.run("s + 1").error is not None
    assert told(session, "usage").count("taken back") == 1


def test_a_retry_that_fails_changes_nothing(session: Session, mock: MockBackend) -> None:
    session.run(ASK)
    mock.errors = {1: OSError("down")}
    assert session.retry().error is not None
    assert said(session) == ["Q", "one"]
    session.undo()
    assert said(session) == []


def test_forks_go_on_over_cells(session: Session) -> None:
    session.run(ASK)
    assert told(session, "fork 2 And?") == "None\n"
    assert sorted(fork["answer"] for fork in session.names["forks"]) == ["three", "two"]
    assert said(session) == ["Q", "one"]
    chosen = session.names["forks"][1]["answer"]
    commands.call(session, "fork take 1")
    assert said(session) == ["Q", "one", "And?", chosen]
    [fork] = session.whole().forks
    assert len(fork.branches) == 2
    session.run("f = s.fork(2)\nf += user('a') + assistant(gen('z'))")
    session.run("f.join()")
    assert len(session.state["z"]) == 2
    for wrong in ("fork take 7", "fork x", "fork 99 y", "fork 2"):
        with pytest.raises(BadProgram):
            commands.call(session, wrong)


@pytest.fixture
def _ctrl_c() -> Iterator[None]:
    """It does what it does in a shell: a suite that runs in the background may have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_of_a_stopped_answer_stays_what_came(folder: Path) -> None:
    reached = threading.Event()

    async def reply(call: Call) -> str:
        return "a b c d e f " * 200

    mock = MockBackend(reply, split=2, chunk_delay_s=0.01)
    session = Session(Opening.of(BackendChoice("mock"), mock), folder=folder)
    session.run('s["kept"] = 1')

    class Watching(Screen):
        def update(self, seen: Any, changed: Any) -> None:
            if seen.partial and not reached.is_set():
                reached.set()
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    made = session.run('s += user("Q") + assistant("So: " + gen("x"))', Watching(Console(file=io.StringIO())))
    assert (made.stopped, made.kept, made.error) == (True, True, None)
    [_, answer] = said(session)
    assert answer.startswith("So: a ")
    assert len(answer) < 1000
    assert session.state["x"] == answer.removeprefix("So: ")
    assert session.state["kept"] == 1
    assert session.cells[-1].stopped
    session.undo()
    assert said(session) == []
    session.close()


def test_files(session: Session, folder: Path, mock: MockBackend) -> None:
    session.run("base = 40")
    session.run('s += system("Be kind.")\n' + ASK)
    session.run('s["pair"] = {"a": [1, None]}\ns["odd"] = {1, 2}')
    assert "odd is kept as its text: a set" in told(session, "save talk.json")
    path = folder / "talk.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    session.run('s += "more"')
    told(session, "load talk.json")
    assert said(session) == ["Be kind.", "Q", "one"]
    assert session.state["pair"] == {"a": [1, None]}
    other = Session(Opening.of(BackendChoice("mock"), mock), folder=folder)
    before = len(mock.calls)
    told(other, "load talk.json")
    assert len(mock.calls) == before  # nothing was run
    assert said(other) == said(session)
    assert "base" not in other.names
    other.run('s += user("R") + assistant(gen("y"))')
    assert [m.content for m in mock.calls[-1].prompt.messages] == ["Be kind.", "Q", "one", "R", ""]
    other.undo(2)
    assert said(other) == []
    for content, why in (
        ("{}", "not a saved session"),
        ("[]", "not a saved session"),
        ("{", "not a saved session"),
        (path.read_text().replace('"sglang_dsl_session": 1', '"sglang_dsl_session": 9'), "version 9"),
        (path.read_text().replace('"kind": "close"', '"kind": "open"'), "not a saved session"),
        (path.read_text().replace('"kind": "close"', '"kind": "root"'), "not a saved session"),
    ):
        (folder / "bad.json").write_text(content)
        with pytest.raises(BadProgram, match=why):
            commands.call(session, "load bad.json")
    with pytest.raises(BadProgram, match="cannot be read"):
        commands.call(session, "load nothing.json")
    with pytest.raises(BadProgram, match="cannot be written"):
        commands.call(session, "save no/such/folder.json")
    assert said(session) == ["Be kind.", "Q", "one"]


def test_a_program_says_what_the_session_said(session: Session, folder: Path) -> None:
    session.run('from math import sqrt\nlands = ["Ostrel"]  # a comment')
    session.run('s += user("lost") + assistant(gen("x"))')
    session.run("1 / 0")
    session.undo()
    session.run('s += system("""Two\n  lines""")\nfor land in lands:\n    s += user(f"{land}, {sqrt(4)}?")')
    session.run('s += assistant(gen("x", max_tokens=5))')
    session.set_defaults({"temperature": 0.5})
    assert told(session, "export talk.py").startswith("a program")
    text = (folder / "talk.py").read_text()
    assert "lost" not in text
    assert "1 / 0" not in text
    assert "# a comment" in text
    assert "temperature=0.5" in text
    names: dict[str, Any] = {"__name__": "talk"}
    exec(compile(text, "talk.py", "exec"), names)
    state = names["session"].run(backend=MockBackend(["two"]))
    assert state.messages() == session.state.messages()
    notebook = nbformat.read(
        folder / "talk.ipynb" if told(session, "export talk.ipynb") else "", as_version=4
    )
    sources = [cell.source for cell in notebook.cells]
    assert sources[1] == "%load_ext sglang_dsl\n%sgl backend mock\n%sgl set temperature=0.5"
    assert all(source.startswith("%%sgl\n") for source in sources[2:])
    assert "lost" not in "".join(sources)
    with pytest.raises(BadProgram, match=r"\.py or \.ipynb"):
        commands.call(session, "export talk.txt")


@pytest.mark.parametrize(
    ("choice", "line"),
    [
        (BackendChoice(), "EngineBackend('pocket')"),
        (BackendChoice("engine", "/m"), "EngineBackend('/m')"),
        (BackendChoice("mock"), "MockBackend()"),
        (BackendChoice("openai", "gpt"), "OpenAI('gpt')"),
        (
            BackendChoice("http://localhost:3"),
            "RuntimeEndpoint('http://localhost:3', os.environ.get('SGLANG_DSL_API_KEY'))",
        ),
    ],
)
def test_a_program_opens_its_backend(choice: BackendChoice, line: str) -> None:
    imports, made = choice.source()
    assert made == line
    ast.parse(made)
    exec(imports, {})


def test_other_backends_and_defaults(session: Session, mock: MockBackend) -> None:
    session.run(ASK)
    told(session, "set temperature=0.25 max_tokens=7")
    session.run(ASK)
    assert mock.calls[-1].sampling.temperature == 0.25
    assert mock.calls[-1].sampling.max_new_tokens == 7
    assert told(session, "set max_tokens=None") == "temperature=0.25\n"
    told(session, "backend mock")
    session.run(ASK)
    assert len(mock.calls) == 2  # it was another one
    assert len(said(session)) == 6
    assert len(session.records) == 3  # all are counted
    for wrong in (
        "backend nobody",
        "backend openai",
        "set temperature=-1",
        "set backend=3",
        "set x",
        "nothing",
        "vrs",
    ):
        with pytest.raises(BadProgram):
            commands.call(session, wrong)
    assert len(said(session)) == 6


def test_a_new_conversation_keeps_what_python_knows(session: Session) -> None:
    session.run("base = 3")
    session.run(ASK)
    commands.call(session, "system Be brief.")
    assert said(session) == ["Be brief."]
    assert "x" not in session.state
    assert [one.code for one in session.counted()] == ["base = 3", 's += system("Be brief.")']
    session.undo()
    assert said(session) == ["Q", "one"]
    commands.call(session, "new")
    assert said(session) == []


def test_what_commands_show(session: Session) -> None:
    assert "no variables yet" in told(session, "vars")
    session.run(ASK)
    assert re.search(r"x +str +one", told(session, "vars"))
    assert told(session, "text") == "USER: Q\nASSISTANT: one\n"
    assert json.loads(told(session, "messages"))[0] == {"role": "user", "content": "Q"}
    assert "tokens/s" in told(session, "time")
    assert "session: calls" in told(session, "trace")
    session.run("@function\ndef p(s):\n    s += gen('deep')")
    assert "Gen(name='deep')" in told(session, "trace p")
    assert all(f":{name}" in told(session, "help") for name in commands.COMMANDS)
    assert commands.call(session, "q").leave
    with pytest.raises(BadProgram, match="did you mean :undo"):
        commands.call(session, "udno")


def test_what_a_model_says_is_no_command_to_the_terminal(folder: Path) -> None:
    session = Session(
        Opening.of(BackendChoice("mock"), MockBackend(["\x1b]0;title\x07 [red]x\x9b2J"])), folder=folder
    )
    out = io.StringIO()
    screen = Screen(Console(file=out, force_terminal=True, width=60, color_system=None))
    made = session.run(ASK + "\ns", screen)
    screen.outcome(session, made)
    for line in ("vars", "text", "messages"):
        screen.console.print(commands.call(session, line).show)
    assert not re.search("[\x07\x9b]|\x1b\\]", out.getvalue())
    assert "[red]x" in out.getvalue()
    session.close()


def test_printing_and_streaming_stand_in_order(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(Console(file=sys.stdout, width=80))
    session.run(f'for i in range(2):\n    {ASK}\n    print("got", s["x"])', screen)
    assert capsys.readouterr().out.splitlines() == [
        line for text in ("one", "two") for line in ("user       Q", f"assistant  {text} ⟵ x", f"got {text}")
    ]


COMPLETE = [
    ("1 + 1", True), ("s += user(", False), ("for x in y:", False), ("for x in y:\n    pass", False),
    ("for x in y:\n    pass\n", True), (":undo", True), ("@function", False), ("x = '''", False), ("", True),
    ("def f(): return 1", True), ("x +", True),
]  # fmt: skip


@pytest.mark.parametrize(("text", "whole"), COMPLETE)
def test_where_a_cell_ends(text: str, whole: bool) -> None:
    assert complete(text) is whole


def test_completion(session: Session, folder: Path) -> None:
    def found(before: str) -> list[str]:
        return [text for text, _, _ in commands.completions(session, before)]

    (folder / "talk.json").write_text("")
    (folder / ".hidden").write_text("")
    (folder / "table").mkdir()
    assert found(":und") == [":undo"]
    assert found(":load ta") == ["table/", "talk.json"]
    assert found(":load ") == ["table/", "talk.json"]
    assert found(":load table/") == found(":load nowhere/") == []
    assert "mock" in found(":backend m")
    assert found(":trace genera") == []
    assert "gen" in found(":trace ge")
    assert found(":nothing x") == found(":undo x") == found("undo") == []


def test_completion_of_python(session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from IPython.core.completer import provisionalcompleter

    from sglang_dsl.console.front.shell import Shell

    for name in ("HOME", "IPYTHONDIR", "XDG_STATE_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    session.run('s["river"] = 1\nboom = type("Boom", (), {"p": property(lambda self: 1 / 0)})()')
    shell = Shell(session, lambda typed: None)

    def found(before: str) -> list[str]:
        with provisionalcompleter():
            return [one.text.lstrip(".") for one in shell.Completer.completions(before, len(before))]

    assert found(":und") == [":undo"]
    assert "mock" in found(":backend m")
    assert found('print(s["ri') == ["river"]
    assert "messages" in found("s.mess")
    assert "assistant" in found("s += assi")
    assert "max_tokens=" in found('gen("x", max_t')
    assert found("boom.p.") == []  # properties are not run
    assert found("nothing.x") == []


def test_what_looked_at_what_is_gone_is_not_exported(session: Session, folder: Path) -> None:
    session.run("n = 1")
    session.run(ASK)
    session.run("s['x']\nm = 2")
    session.run("k = 3")
    commands.call(session, "fork 2 And?")
    [forked] = session.undo()
    assert forked.code.startswith("forks = ")
    session.undo()
    assert [one.code for one in session.counted()] == ["n = 1", "k = 3"]
