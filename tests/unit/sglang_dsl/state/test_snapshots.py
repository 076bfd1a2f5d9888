"""A running program as views see it: frozen data of one moment, from any thread, while it goes on."""

from __future__ import annotations

import ast
import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sglang_dsl as sgl
from sglang_dsl import MockBackend, gen
from sglang_dsl.backends.base import Call, Completion
from sglang_dsl.concurrency.loop import background
from sglang_dsl.views.snapshot import Snapshot

PACKAGE = Path(sgl.__file__).parent


class Gated(MockBackend):
    """Answers the first `free` calls; each other one when the gate is open."""

    def __init__(self, free: int) -> None:
        super().__init__(lambda call: "yes")
        self.free, self.open = free, threading.Event()

    async def generate(self, call: Call) -> Completion:
        if len(self.calls) >= self.free:
            while not self.open.is_set():
                await asyncio.sleep(0.01)
        return await super().generate(call)


def test_a_snapshot_is_one_moment_and_does_not_change() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += sgl.user("a question") + sgl.assistant(gen("first"))
        s += sgl.user("and") + sgl.assistant(gen("second"))

    backend = Gated(free=1)
    state = program.run(backend=backend)
    assert state["first"] == "yes"
    before = state.snapshot()
    assert before.running
    assert before.variables["first"].status == "done"
    assert before.variables["first"].value == before.variables["first"].text == "yes"
    assert before.variables["second"].status == "pending"
    assert before.text.startswith("USER: a question\nASSISTANT: yes\n")
    assert [call.name for call in before.calls] == ["first"]
    backend.open.set()
    state.sync()
    after = state.snapshot()
    assert before.variables["second"].status == "pending"
    assert not after.running
    assert after.variables["second"].value == "yes"
    assert after.text == state.text()
    assert after.messages == state.messages()
    assert after.usage == state.usage() | {}
    with pytest.raises(AttributeError):
        after.running = True  # type: ignore[misc]


def test_forks_are_in_it_while_they_run_and_after_they_were_joined() -> None:
    backend = Gated(free=0)
    seen: list[Snapshot] = []

    @sgl.function
    def program(s: Any) -> None:
        s += "begin "
        forks = s.fork(2)
        forks += lambda i: f"side {i}: " + gen("x")
        seen.append(s.snapshot())
        backend.open.set()
        forks.join()
        seen.append(s.snapshot())

    program.run(backend=backend)
    [running] = seen[0].forks
    assert not running.joined
    assert [one.branch for one in running.branches] == [(0,), (1,)]
    assert all(one.running for one in running.branches)
    [joined] = seen[1].forks
    assert joined.joined
    assert [one.transcript.text(one.since) for one in joined.branches] == ["side 0: yes", "side 1: yes"]
    assert [one.variables["x"].value for one in joined.branches] == ["yes", "yes"]
    assert seen[1].variables["x"].value == ["yes", "yes"]


def test_a_failure_is_in_it() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "said " + gen("x") + gen("y")

    state = program.run(backend=MockBackend(errors={1: RuntimeError("down")}))
    error = state.error()
    shown = state.snapshot()
    assert type(shown.error) is type(error)
    assert "down" in str(shown.error)
    assert [one.status for one in shown.variables.values()] == ["done", "failed"]
    assert shown.text.startswith("said ")


@given(st.lists(st.text(max_size=8), min_size=1, max_size=12), st.booleans())
def test_whoever_looks_meanwhile_sees_whole_moments(answers: list[str], stream: bool) -> None:
    """Of each variable that is done the text was said and the call recorded; what was said only grows."""
    seen: list[Snapshot] = []
    over = threading.Event()

    @sgl.function
    def program(s: Any) -> None:
        for index in range(len(answers)):
            s += sgl.user("?") + sgl.assistant(gen(f"v{index}"))

    left = iter(answers)
    state = program.run(backend=MockBackend(lambda call: next(left)), stream=stream)

    def look() -> None:
        while not over.is_set():
            seen.append(state.snapshot())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        state.sync()
    finally:
        over.set()
        thread.join()
    seen.append(state.snapshot())
    whole = seen[-1].text
    for one in seen:
        done = [variable for variable in one.variables.values() if variable.status == "done"]
        assert whole.startswith(one.text)
        said = [entry.value for entry in one.transcript.entries() if entry.chosen is not None]
        assert [variable.value for variable in done] == said[: len(done)]
        assert len(one.calls) >= len(said)
    assert [variable.value for variable in seen[-1].variables.values()] == answers


def test_a_state_can_be_looked_at_on_the_languages_own_loop() -> None:
    @sgl.function
    def program(s: Any) -> None:
        s += "x" + gen("a")

    backend = Gated(free=0)
    state = program.run(backend=backend)

    async def look() -> Snapshot:
        return state.core.snapshot(None)

    assert background().run(look(), 60).running
    backend.open.set()
    assert not state.core.snapshot(None).running


def test_views_know_snapshots_and_no_states() -> None:
    for view in (PACKAGE / "views").glob("*.py"):
        tree = ast.parse(view.read_text(encoding="utf-8"))
        known = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        rooms = {name.split(".")[1] for name in known if name.startswith("sglang_dsl.")}
        assert rooms <= {"views", "conversation", "ir", "errors", "hooks"}, view
