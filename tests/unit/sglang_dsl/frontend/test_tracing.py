"""Compiling a program without a backend."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import sglang_dsl as sgl
from sglang_dsl import BadProgram, MockBackend, Program, gen, select
from sglang_dsl.ir import Fork, Gen, Join, RoleBegin, ScopeBegin, Text


@sgl.function
def story(s: Any, topic: str, count: int = 2, *, tone: str) -> None:
    s += f"About {topic} " + f"({tone}): "
    with s.user():
        s += "go"
    s.assistant(gen("a", max_tokens=int(count)))
    with s.var_scope("whole"):
        s += select("c", ["x", "y"])
    forks = s.fork(count)
    for i, fork in enumerate(forks):
        fork += f" part {i}" + gen("p", dtype=int)
    forks.join()
    s += " ".join(s["p"]) + s["whole"] + str(int(s["a"]))


def test_a_program_is_written_down_with_forks_variables_and_places() -> None:
    program = story.trace(count=3)
    assert program.name == "story"
    assert program.arguments == ("topic", "tone")
    assert program.variables == ("a", "c", "whole", "p")
    kinds = [type(node) for node in program.body.nodes]
    assert kinds[:2] == [Text, RoleBegin]
    fork = next(node for node in program.nodes if isinstance(node, Fork))
    assert len(fork.branches) == 3
    assert [type(n) for n in fork.branches[1].nodes] == [Text, Gen]
    assert any(isinstance(node, Join) for node in program.nodes)
    assert any(isinstance(node, ScopeBegin) for node in program.nodes)
    assert program.body.nodes[0] == Text("About {topic} ({tone}): ")
    assert program.body.nodes[-1] == Text("{p} {p} {p}{c}0")
    tree = str(program)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "part {i}" in text)
    assert f"Gen(name='p', dtype='int')  # {Path(__file__).name}:{line}" in tree
    assert tree.splitlines()[0] == "story(topic, tone)"
    assert "branch 2" in tree


def test_a_program_goes_to_json_and_back() -> None:
    program = story.compile("cats", tone="dry")
    again = Program.from_json(program.to_json())
    assert again == program
    assert again.tree() == program.tree()
    assert [n.src for n in again.nodes if isinstance(n, Gen)] == [
        n.src for n in program.nodes if isinstance(n, Gen)
    ]
    with pytest.raises(ValueError):
        Program.from_dict({"program": "x", "arguments": [], "body": {"kind": "text", "text": "a"}})


def test_programs_called_while_tracing_are_traced_too() -> None:
    @sgl.function
    def inner(s: Any, x: str) -> None:
        s += x + gen("y")

    @sgl.function
    def outer(s: Any) -> None:
        s += inner("a")["y"] + inner.run_batch([{"x": "b"}])[0]["y"]

    assert outer.trace().body.nodes == (Text("{y}{y}"),)


def test_tracing_in_one_thread_leaves_the_others_alone() -> None:
    entered, go_on = threading.Event(), threading.Event()

    @sgl.function
    def slow(s: Any) -> None:
        entered.set()
        go_on.wait(300)

    tracing = threading.Thread(target=slow.trace)
    tracing.start()
    assert entered.wait(300)
    state = sgl.function(lambda s: s.__iadd__(gen("x"))).run(backend=MockBackend(["real"]))
    go_on.set()
    tracing.join(300)
    assert not tracing.is_alive()
    assert state["x"] == "real"


def test_a_body_that_needs_real_values_is_refused_with_the_reason() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += gen("x")
        {"a": 1}[s["x"]]

    with pytest.raises(BadProgram, match="KeyError"):
        program.trace()
    with pytest.raises(sgl.MissingVariable, match="known: none"):
        sgl.function(lambda s: s["x"]).trace()
    with pytest.raises(BadProgram, match="cannot start inside"):
        sgl.function(lambda s: s.__iadd__(sgl.user("a" + sgl.user("b")))).trace()


def test_words_of_run_and_bound_arguments_are_taken() -> None:
    program = story.bind(tone="wry").trace("dogs", temperature=0.5)
    assert program.arguments == ()
    assert "(wry)" in program.tree()


def test_the_rest_of_a_state_works_while_tracing() -> None:
    @sgl.function
    def program(s: Any) -> Any:
        s += sgl.user("hi")
        assert "x" not in s
        s.set_var("x", "1")
        s.sync()
        s.cancel()
        assert s.error() is None
        assert s.usage()["calls"] == 0
        assert list(s.text_iter()) == [s.text()] == ["USER: hi\n"]
        assert list(s.text_iter("x")) == ["1"]
        assert s.messages() == [{"role": "user", "content": "hi"}]
        with s.copy() as other:
            other += gen("y")
        assert s["y"] == ["{y}"]

    program.trace()


def test_scopes_of_one_name_within_each_other_each_have_their_own_text() -> None:
    found: list[str] = []

    @sgl.function
    def program(s: sgl.ProgramState) -> None:
        s += "0"
        with s.var_scope("a"):
            s += "1"
            with s.var_scope("a"):
                s += "2"
            found.append(s["a"])
            s += "3"
        found.append(s["a"])

    program.run()
    program.trace()
    assert found == ["2", "123"] * 2


def test_a_compiled_program_runs_its_function_and_prints_as_sglangs_programs_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    @sgl.function
    def tip(s: Any, topic: str) -> None:
        s += f"A tip for {topic}: " + gen("tip", max_tokens=4)

    @sgl.function
    def tips(s: Any, topic: str) -> None:
        s += tip(topic=topic)["tip"] + ". In short: " + gen("short", max_tokens=4)

    backend = MockBackend(["sleep", "rest", "eat", "food", "move", "walk"])
    compiled = tips.compile()
    assert compiled.run(topic="health", backend=backend).text() == "sleep. In short: rest"
    items = [{"topic": "a"}, {"topic": "b"}]
    states = compiled.run_batch(items, temperature=0, num_threads=1, backend=backend)
    assert [state.text() for state in states] == ["eat. In short: food", "move. In short: walk"]
    assert tips.trace().last_node.print_graph_dfs() == compiled.tree()
    compiled.print_graph()
    assert capsys.readouterr().out == compiled.tree() + "\n"
    read = Program.from_json(compiled.to_json())
    assert read == compiled
    for run in (read.run, read.run_batch):
        with pytest.raises(BadProgram, match="tips was read from JSON, which contains no function"):
            run([])
